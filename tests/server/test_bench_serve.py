"""`paged bench serve` against the fake engine's server, and against servers that misbehave."""

import asyncio
import collections
import json
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from aiohttp import web

from paged.server.bench_load import arrival_times
from paged.server.bench_serving import Measurement
from paged.server.bench_timeline import METRICS, Timeline
from paged.server.cli import main
from tests.server.process import ROOT, ServerProcess, fake_server

SMALL = ["--vocab-size=250", "--random-input-len=10", "--random-output-len=8", "--disable-tqdm"]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    for name in ("PAGED_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> ServerProcess:
    with fake_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def bench(url: str, *options: str) -> int:
    return main(["bench", "serve", "--base-url", url, *SMALL, *options])


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_figures_are_written_under_their_names(server, tmp_path, capsys, endpoint, suffix):
    file = tmp_path / "result.json"
    options = ["--num-prompts=6", "--ignore-eos", "--num-warmups=1", f"--json={file}"]
    assert bench(server.url + suffix, f"--endpoint={endpoint}", *options) == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["interrupted"]) == (6, 0, 0)
    assert result["model_id"] == "tiny"
    assert result["request_rate"] == "inf"
    assert result["total_output_tokens"] == 6 * 8
    if endpoint == "/v1/completions":
        assert result["total_input_tokens"] == 6 * 10
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])
    total = (48 + result["total_input_tokens"]) / result["duration"]
    assert result["total_token_throughput"] == pytest.approx(total)
    for metric in METRICS:
        low, middle, high = (result[f"p{p}_{metric}_ms"] for p in (50, 95, 99))
        assert 0 < low <= middle <= high
    # The server pauses 10 ms before each of the 8 tokens.
    assert result["p50_e2el_ms"] >= 80
    assert result["p50_tpot_ms"] >= 9
    assert set(result["versions"]) >= {"paged", "python", "aiohttp"}
    assert "Output token throughput (tok/s):" in capsys.readouterr().out


def test_texts_that_end_early_are_counted_as_long_as_they_are(server, tmp_path):
    file = tmp_path / "result.json"
    assert bench(server.url, "--num-prompts=2", "--random-output-len=50", f"--json={file}") == 0
    # "The answer is 42." in bytes, and the end of the text.
    assert json.loads(file.read_text())["total_output_tokens"] == 2 * 18


def test_no_more_requests_are_under_way_than_allowed(server, tmp_path):
    file = tmp_path / "result.json"
    assert bench(server.url, "--num-prompts=6", "--max-concurrency=2", f"--json={file}") == 0
    assert json.loads(file.read_text())["max_concurrent_requests"] == 2


def scripted(answer, *options: str, models=("m",)) -> tuple[int, list[dict]]:
    """Run the command against `answer(body) -> Response`; return its status and what it sent."""
    seen = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body | {"key": request.headers.get("Authorization")})
        return answer(len(seen))

    async def list_models(_request: web.Request) -> web.Response:
        if isinstance(models, web.Response):
            return models
        return web.json_response({"data": [{"id": name} for name in models]})

    async def measure() -> int:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/v1/chat/completions", handler)
        app.router.add_get("/v1/models", list_models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        status = await asyncio.to_thread(bench, url, *options)
        await runner.cleanup()
        return status

    return asyncio.run(measure()), seen


DONE = "data: [DONE]"


def stream(*events: object) -> web.Response:
    """Answer with these events, dictionaries as JSON, and the end of the stream."""
    lines = [e if isinstance(e, str) else f"data: {json.dumps(e)}" for e in [*events, DONE]]
    return web.Response(text="\n\n".join([*lines, ""]), content_type="text/event-stream")


def text(content: str) -> dict:
    return {"choices": [{"index": 0, "text": content}]}


def test_options_reach_the_server():
    options = ["--temperature=0.5", "--top-p=0.9", "--top-k=5", "--ignore-eos", "--api-key=k"]
    extra = ["--extra-body", '{"min_tokens": 3}', "--random-prefix-len=4", "--model=m"]
    given = ["--num-prompts=2", *options, *extra]
    status, (first, second) = scripted(lambda _: stream(text("a")), *given)
    assert status == 0
    assert first["prompt"][:4] == second["prompt"][:4]
    assert first["prompt"][4:] != second["prompt"][4:]
    assert len(first["prompt"]) == 14
    del first["prompt"]
    assert first == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "ignore_eos": True, "max_tokens": 8,
        "min_tokens": 3, "key": "Bearer k",
    }  # fmt: skip


def test_key_of_the_environment_is_used(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    _, (seen,) = scripted(lambda _: stream(text("a")), "--num-prompts=1")
    assert seen["key"] == "Bearer secret"


def test_prompts_of_a_chat_are_words_and_what_was_left_out_is_not_sent():
    chunk = {"choices": [{"delta": {"content": "x"}}]}
    chat = ["--endpoint=/v1/chat/completions", "--random-prefix-len=3", "--num-prompts=1"]
    _, (seen,) = scripted(lambda _: stream(chunk), *chat)
    ((message),) = seen.pop("messages")
    assert message["role"] == "user"
    assert len(message["content"].split()) == 13
    assert seen == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True},
        "max_completion_tokens": 8, "key": None,
    }  # fmt: skip


def test_server_that_counts_nothing_has_its_outputs_counted(tmp_path):
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in "abc"]
    file = tmp_path / "result.json"
    chat = ["--endpoint=/v1/chat/completions", "--num-prompts=1", f"--json={file}"]
    status, _ = scripted(lambda _: stream(": hello", opening, *pieces), *chat)
    assert status == 0
    result = json.loads(file.read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 3)


def test_failed_requests_are_counted_shown_and_left_out_of_the_figures(tmp_path, capsys):
    bad = [
        lambda: web.json_response({"error": {"message": "too\nmany"}}, status=429),
        lambda: web.Response(text="gone", status=502),
        lambda: stream(text("a"), {"error": {"message": "the engine died"}}),
        lambda: stream(),
        lambda: web.Response(text=f"data: {json.dumps(text('a'))}\n\n"),
        lambda: stream("data: {"),
        lambda: stream([1]),
    ]
    file = tmp_path / "result.json"

    def answer(number: int) -> web.Response:
        return bad[number - 1]() if number <= len(bad) else stream(text("a"), text("b"))

    status, _ = scripted(answer, "--num-prompts=9", "--max-concurrency=1", f"--json={file}")
    assert status == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (2, 7)
    assert result["total_output_tokens"] == 4
    captured = capsys.readouterr()
    assert re.search(r"Failed requests: +7\n", captured.out)
    lines = captured.err.splitlines()
    assert len(lines) == 5, "the first five different ones"
    assert lines == [
        "1 failed: status 429: too many",
        "1 failed: status 502: gone",
        "1 failed: the engine died",
        "1 failed: the answer broke off before its first token",
        "1 failed: the answer broke off before its end",
    ]


def failing(capsys, *arguments: str) -> str:
    """Run a command that must fail; return its one line."""
    assert main(["bench", "serve", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_server_that_is_not_there_is_one_line(capsys):
    line = failing(capsys, "--base-url", "http://127.0.0.1:1")
    assert line.startswith("paged: error: no server answers at http://127.0.0.1:1: Cannot connect")


def test_address_that_is_none_is_one_line(capsys):
    line = failing(capsys, "--base-url", "localhost:8000")
    assert line == "paged: error: --base-url localhost:8000 is no address; write http://HOST:PORT."


def test_model_that_does_not_exist_is_one_line(server, capsys):
    line = failing(capsys, "--base-url", server.url, "--model", "other")
    assert line.endswith(f"the model other does not exist at {server.url}; it has tiny.")


def test_no_success_at_all_is_one_line(server, capsys):
    # Token ids that the fake engine does not have.
    options = ["--vocab-size=100000", "--num-prompts=3", "--disable-tqdm"]
    line = failing(capsys, "--base-url", server.url, *options)
    assert line.startswith("paged: error: none of 3 requests succeeded: status 400: prompt must")


def test_file_that_cannot_be_written_is_found_out_first(capsys):
    line = failing(capsys, "--base-url", "http://127.0.0.1:1", "--json", "/no/such/folder/x")
    assert line == "paged: error: cannot write /no/such/folder/x: No such file or directory."


@pytest.mark.parametrize("before", [None, "kept"])
def test_run_that_fails_leaves_the_file_as_it_was(tmp_path, capsys, before):
    file = tmp_path / "result.json"
    if before is not None:
        file.write_text(before)
    failing(capsys, "--base-url", "http://127.0.0.1:1", "--json", str(file))
    assert (file.read_text() if file.exists() else None) == before


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (web.Response(status=404), [], "does not name its models; give --model."),
        (web.Response(text="{}"), [], "does not name its models; give --model."),
        (
            web.json_response({"error": {"message": "wrong key"}}, status=401),
            ["--model=m"],
            "refuses the API key: status 401: wrong key",
        ),
    ],
)
def test_server_that_cannot_be_asked_is_one_line(capsys, models, options, message):
    status, seen = scripted(lambda _: stream(text("a")), *options, models=models)
    assert (status, seen) == (1, [])
    assert message in capsys.readouterr().err


def test_server_that_names_no_models_serves_the_one_that_is_given():
    missing = web.Response(status=404)
    status, (seen,) = scripted(
        lambda _: stream(text("a")), "--model=mine", "--num-prompts=1", models=missing
    )
    assert (status, seen["model"]) == (0, "mine")


def test_interruption_prints_what_there_is(server, tmp_path):
    file = tmp_path / "result.json"
    options = ["--num-prompts=1000", "--request-rate=20", "--burstiness=inf", f"--json={file}"]
    command = [sys.executable, "-m", "paged.server.cli", "bench", "serve", "--base-url"]
    command += [server.url, *SMALL, "--no-disable-tqdm", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, bufsize=0, **pipes) as process:
        try:
            shown = b""
            while not re.search(rb" [1-9]\d*/1000", shown):
                got = process.stderr.read(1)
                assert got, shown
                shown += got
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    result = json.loads(file.read_text())
    assert result["completed"] > 0
    assert result["interrupted"] == 1000 - result["completed"]
    assert re.search(rf"Successful requests: +{result['completed']}\n", out.decode())
    assert f"Interrupted: {result['interrupted']} requests were not finished." in err.decode()
    assert b"Traceback" not in err


def test_interruption_before_the_first_end_is_one():
    with pytest.raises(KeyboardInterrupt):
        Measurement([Timeline(num_prompt_tokens=1)], 1.0, complete=False).check()


def test_answer_that_ends_with_a_reason_needs_no_further_mark():
    last = {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}
    plain = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (text("a"), last))
    status, _ = scripted(lambda _: web.Response(text=plain), "--num-prompts=1")
    assert status == 0


@pytest.mark.parametrize(
    ("event", "message"),
    [("data: {", "DecodeError: "), ("data: [1]", "the answer is none of OpenAI's: AttributeError")],
)
def test_answer_of_another_shape_is_a_failure(capsys, event, message):
    status, _ = scripted(lambda _: stream(event), "--num-prompts=1")
    assert status == 1
    assert f"none of 1 requests succeeded: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_spread_of_a_gamma_distribution_and_meet_the_rate(burstiness):
    times = arrival_times(np.random.default_rng(0), 20_000, 10.0, burstiness)
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(2000.0)
    # Its coefficient of variation is one over the root of its shape: 1 for a Poisson process.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_gaps_are_even_at_infinite_burstiness_and_none_at_an_infinite_rate():
    rng = np.random.default_rng(0)
    assert arrival_times(rng, 4, 2.0, float("inf")).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert arrival_times(rng, 3, float("inf"), 1.0).tolist() == [0.0, 0.0, 0.0]


def test_next_turn_of_a_chat_is_sent_with_the_answers_before_it():
    last = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    thought = {"choices": [{"delta": {"reasoning": "hm"}}]}

    def answer(number: int) -> web.Response:
        pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in (f"{number}", "!")]
        return stream(role, thought, *pieces, last)

    options = ["--endpoint=/v1/chat/completions", "--dataset-name=multi_turn", "--num-prompts=3"]
    status, seen = scripted(answer, *options, "--multi-turn-num-turns=3")
    assert status == 0
    first, second, third = (body["messages"] for body in seen)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[:3] == [*first, {"role": "assistant", "content": "1!"}]
    assert third[:5] == [*second, {"role": "assistant", "content": "2!"}]
    assert [len(messages) for messages in (first, second, third)] == [2, 4, 6]


def test_turns_after_one_that_failed_fail_unsent(tmp_path):
    def answer(number: int) -> web.Response:
        return stream(text("a")) if number == 1 else web.Response(status=500, text="no")

    file = tmp_path / "result.json"
    options = ["--endpoint=/v1/chat/completions", "--dataset-name=multi_turn", "--num-prompts=4"]
    options += ["--multi-turn-num-turns=4", "--save-detailed", f"--json={file}"]
    status, seen = scripted(answer, *options)
    assert (status, len(seen)) == (0, 2)
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["error_rate"]) == (1, 3, 0.75)
    unsent = "not sent: the turn before it failed"
    assert result["errors"] == ["", "status 500: no", unsent, unsent]


def test_cached_tokens_are_those_that_the_server_reports(tmp_path):
    def answer(number: int) -> web.Response:
        details = {"prompt_tokens_details": {"cached_tokens": 3}} if number == 2 else {}
        usage = {"prompt_tokens": 10, "completion_tokens": 1, **details}
        return stream(text("a"), {"choices": [], "usage": usage})

    file = tmp_path / "result.json"
    options = ["--num-prompts=2", "--max-concurrency=1", f"--json={file}"]
    assert scripted(answer, *options, "--save-detailed")[0] == 0
    result = json.loads(file.read_text())
    assert (result["total_cached_tokens"], result["cached_lens"]) == (3, [None, 3])
    assert scripted(lambda _: stream(text("a")), *options)[0] == 0
    assert json.loads(file.read_text())["total_cached_tokens"] is None


def test_goodput_counts_what_is_fast_enough(server, tmp_path, capsys):
    file = tmp_path / "result.json"
    # Eight tokens, 10 ms each: 80 ms in all, and some.
    options = ["--num-prompts=4", "--ignore-eos", "--max-concurrency=1", f"--json={file}"]
    for objectives, good in ((["ttft:90000", "e2el:90000"], 4), (["ttft:90000", "e2el:70"], 0)):
        assert bench(server.url, *options, "--goodput", *objectives) == 0
        result = json.loads(file.read_text())
        assert result["good_completed"] == good
        assert result["request_goodput"] == pytest.approx(good / result["duration"])
        assert "Request goodput (req/s):" in capsys.readouterr().out


def test_detailed_record_agrees_with_the_figures(server, tmp_path):
    file = tmp_path / "result.json"
    options = ["--num-prompts=5", "--ignore-eos", "--save-detailed", f"--json={file}"]
    assert bench(server.url, *options, "--metadata", "commit=abc", "note=x=y") == 0
    result = json.loads(file.read_text())
    assert (result["commit"], result["note"]) == ("abc", "x=y")
    assert np.mean(result["ttfts"]) * 1e3 == pytest.approx(result["mean_ttft_ms"])
    assert np.percentile(np.concatenate(result["itls"]), 95) * 1e3 == pytest.approx(
        result["p95_itl_ms"]
    )
    assert np.median(result["latencies"]) * 1e3 == pytest.approx(result["median_e2el_ms"])
    assert sum(result["output_lens"]) == result["total_output_tokens"]
    assert min(result["start_times"]) == 0
    assert result["settings"]["dataset_name"] == "random"


def test_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path):
    file = tmp_path / "page.html"
    name = "<script>alert(1)</script>"
    options = ["--num-prompts=3", f"--model={name}", f"--html={file}"]
    assert scripted(lambda _: stream(text("a"), text("b")), *options, models=(name,))[0] == 0
    page = file.read_text()
    tree = PageParser(page)
    assert tree.tags["svg"] == 6
    assert not {"script", "link", "img", "iframe"} & set(tree.tags)
    assert not re.search(r"""(src|href|url\()\s*=?\s*["']?http""", page)
    assert any("Time to first token (TTFT)" in each for each in tree.texts)
    assert any(name in each for each in tree.texts)


class PageParser(HTMLParser):
    """Counts the tags of a page and keeps its texts; every tag must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = collections.Counter()
        self.texts = []
        self.open = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
