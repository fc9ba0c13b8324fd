"""`paged run-batch`: lines in, lines out, resumed where it ended, errors line by line."""

import asyncio
import contextlib
import email.utils
import http.server
import json
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from paged.scheduler.params import PoolingParams
from paged.server import cli_engine
from paged.server.cli import build_parser, main
from paged.server.client import Client
from tests.server.fake_engine import FakeEngine
from tests.server.process import fake_server

ANSWER = "The answer is 42."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}]}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {result["custom_id"]: result for result in results}
    assert len(by_id) == len(results), "no request is answered twice"
    return by_id


def run_batch(source: Path, output: Path, url: str, *options: str) -> int:
    files = ["-i", str(source), "-o", str(output)]
    return main(["run-batch", "--url", url, *files, *options])


def test_every_line_is_answered_in_its_endpoints_shape(server, tmp_path, capsys):
    prompt = {"prompt": "Hi", "max_tokens": 3}
    source = write(
        tmp_path / "in.jsonl",
        [
            line("chat"),
            "",
            line("text", url="/v1/completions", body=prompt),
            line("vector", url="/v1/embeddings", body={"input": "Hi"}),
            line("response", url="/v1/responses", body={"input": "Hi"}),
        ],
    )
    assert run_batch(source, tmp_path / "out.jsonl", server.url) == 0
    results = read(tmp_path / "out.jsonl")
    assert set(results) == {"chat", "text", "vector", "response"}
    for result in results.values():
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert result["id"].startswith("batch_req_")
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
    chat = results["chat"]["response"]
    assert chat["body"]["choices"][0]["message"]["content"] == ANSWER
    assert chat["body"]["id"] == f"chatcmpl-{chat['request_id']}"
    assert results["text"]["response"]["body"]["choices"][0]["text"] == "The"
    assert len(results["vector"]["response"]["body"]["data"][0]["embedding"]) == 8
    assert "4 answered, 0 failed, 0 skipped" in capsys.readouterr().out


def test_a_second_run_goes_on_where_the_first_one_ended(server, tmp_path, capsys):
    lines = [line(str(i)) for i in range(20)]
    output = tmp_path / "out.jsonl"
    run_batch(write(tmp_path / "first.jsonl", lines[:12]), output, server.url)
    first = output.read_bytes()
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"13","respon')  # where it was killed
    source = write(tmp_path / "in.jsonl", lines)
    run_batch(source, output, server.url, "--max-concurrency", "3")
    assert output.read_bytes().startswith(first)
    assert set(read(output)) == {str(i) for i in range(20)}
    assert "8 answered, 0 failed, 12 skipped" in capsys.readouterr().out
    assert run_batch(source, output, "http://127.0.0.1:1") == 0, "nothing is left to ask"


def test_what_is_wrong_with_a_line_is_its_own_result(server, tmp_path, capsys):
    source = write(
        tmp_path / "in.jsonl",
        [
            line("good"),
            line("model", body={"model": "x", "messages": []}),
            line("field", body={"messages": 3}),
            line("body", body=[1]),
            line("stream", body={"messages": [], "stream": True}),
            line("url", url="/v1/audio/speech"),
            line("method", method="GET"),
        ],
    )
    assert run_batch(source, tmp_path / "out.jsonl", server.url) == 0
    results = read(tmp_path / "out.jsonl")
    statuses = {k: r["response"] and r["response"]["status_code"] for k, r in results.items()}
    assert statuses == {
        "good": 200, "model": 404, "field": 400, "body": 400, "stream": None, "url": None,
        "method": None,
    }  # fmt: skip
    assert results["model"]["error"]["code"] == "404"
    assert "does not exist" in results["model"]["error"]["message"]
    assert results["model"]["response"]["body"]["error"]["param"] == "model"
    assert "stream must be false" in results["stream"]["error"]["message"]
    assert "url must be one of" in results["url"]["error"]["message"]
    assert "method must be 'POST'" in results["method"]["error"]["message"]
    assert "1 answered, 6 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a"), "{"], "line 2"),
        ([{"custom_id": "a"}], "line 1: Object missing required field `url`"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is that of line 1"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_runs(tmp_path, capsys, lines, message):
    source = write(tmp_path / "in.jsonl", lines)
    assert run_batch(source, tmp_path / "out.jsonl", "http://127.0.0.1:1") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("content", ["a precious text\n", "a precious text", '{"x": 1}\n'])
def test_an_output_file_that_holds_something_else_is_left_alone(tmp_path, capsys, content):
    source = write(tmp_path / "in.jsonl", [line("a")])
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    assert run_batch(source, output, "http://127.0.0.1:1") == 1
    assert "give another --output-file" in capsys.readouterr().err
    assert output.read_text() == content


def test_missing_file_and_missing_server_are_told(tmp_path, capsys):
    assert run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", "http://127.0.0.1:1") == 1
    assert "none.jsonl" in capsys.readouterr().err
    source = write(tmp_path / "in.jsonl", [line("a")])
    assert run_batch(source, tmp_path / "out.jsonl", "http://127.0.0.1:1") == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_concurrency_must_be_positive(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_batch(tmp_path / "in", tmp_path / "out", "http://x", "--max-concurrency", "0")
    assert "at least 1" in capsys.readouterr().err


@contextlib.contextmanager
def scripted(
    answers: list[tuple[int, bytes]],
    headers: Mapping[str, str] = MappingProxyType({}),
    times: list[float] | None = None,
) -> Iterator[str]:
    """Yield the URL of a server that gives these answers, one after another.

    Args:
      answers: status and body.
      headers: of those that are no 200.
      times: gets when each request came, monotonic seconds.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if times is not None:
                times.append(time.monotonic())
            status, body = answers.pop(0)
            self.send_response(status)
            for name, value in {} if status == 200 else headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_full_server_is_asked_again(tmp_path):
    source = write(tmp_path / "in.jsonl", [line("a")])
    with scripted([(429, b"{}"), (200, b'{\n "spelt": "over lines"\n}')]) as url:
        assert run_batch(source, tmp_path / "out.jsonl", url) == 0
    result = read(tmp_path / "out.jsonl")["a"]
    assert result["response"]["body"] == {"spelt": "over lines"}


def test_a_full_server_is_asked_again_when_it_says(tmp_path):
    source = write(tmp_path / "in.jsonl", [line("a")])
    times: list[float] = []
    with scripted([(429, b"{}"), (200, b"{}")], {"Retry-After": "2"}, times) as url:
        assert run_batch(source, tmp_path / "out.jsonl", url) == 0
    first, second = times
    assert second - first >= 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 0.0),
        ("soon", None),
        ("-1", None),
    ],
)
def test_an_answer_says_when_to_come_again(header, seconds):
    async def ask(url: str) -> float | None:
        async with Client(url) as client:
            return (await client.post("completions", b"{}", request_id="r")).retry_seconds

    with scripted([(429, b"{}")], {"Retry-After": header}) as url:
        assert asyncio.run(ask(url)) == seconds
    later = email.utils.format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    with scripted([(429, b"{}")], {"Retry-After": later}) as url:
        assert asyncio.run(ask(url)) == pytest.approx(86400, rel=0.05)


def test_a_server_that_is_gone_ends_the_run_and_leaves_the_rest_to_the_next(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [line("a"), line("b"), line("c")])
    output = tmp_path / "out.jsonl"
    dead = b'{"error": {"message": "The engine has failed."}}'
    with scripted([(200, b"{}"), (503, dead)]) as url:
        assert run_batch(source, output, url, "--max-concurrency", "1") == 1
    assert "The engine has failed. Run the command again" in capsys.readouterr().err
    assert set(read(output)) == {"a"}


def test_an_answer_that_is_no_json_is_kept_as_a_text(tmp_path):
    source = write(tmp_path / "in.jsonl", [line("a")])
    with scripted([(502, b"<html>")]) as url:
        assert run_batch(source, tmp_path / "out.jsonl", url) == 0
    result = read(tmp_path / "out.jsonl")["a"]
    assert result["response"]["body"] == "<html>"
    assert "status 502: <html>" in result["error"]["message"]


def test_a_private_server_goes_by_the_names_of_the_lines():
    async def ask() -> int:
        async with cli_engine.serve_privately(FakeEngine(), ("gpt-x",)) as client:
            # More stop strings than a server takes from strangers.
            body = b'{"model": "gpt-x", "prompt": "Hi", "stop": ["1", "2", "3", "4", "5"]}'
            return (await client.post("completions", body, request_id="r")).status

    assert asyncio.run(ask()) == 200


def test_a_private_server_makes_vectors_as_the_command_says(capsys, tmp_path):
    args = build_parser().parse_args(
        ["run-batch", "-i", "a", "-o", "b", "--pooler-config", '{"pooling_type": "mean"}']
    )
    engine = FakeEngine()
    engine.checkpoint.pooling_modes = frozenset({"cls"})

    async def ask() -> int:
        serving = cli_engine.serve_privately(engine, pooler_config=args.pooler_config)
        async with serving as client:
            return (await client.post("embeddings", b'{"input": "Hi"}', request_id="r")).status

    assert asyncio.run(ask()) == 200
    assert engine.seen[-1].params == PoolingParams(pooling="mean")
    source = write(tmp_path / "in.jsonl", [line("a")])
    told = ("--pooler-config", '{"normalize": false}')
    assert run_batch(source, tmp_path / "out.jsonl", "http://x", *told) == 1
    assert "start the server with it" in capsys.readouterr().err
