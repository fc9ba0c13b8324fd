"""`paged bench serve` against the fake engine's server, and against servers that misbehave."""

import asyncio
import collections
import json
import re
import signal
import ssl
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from aiohttp import web

from paged.server.bench_arrivals import arrival_times, ramp_rates
from paged.server.bench_names import METRICS
from paged.server.bench_serving import Measurement
from paged.server.bench_timeline import Timeline
from paged.server.cli import main
from paged.server.tls import make_ssl_context
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


def scripted(
    answer,
    *options: str,
    models=("m",),
    headers: list | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> tuple[int, list[dict]]:
    """Run the command against `answer(body) -> Response`; return its status and what it sent.

    `models` is a response, a function that returns one, or the names; `headers` takes those of
    the requests.
    """
    seen = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body | {"key": request.headers.get("Authorization")})
        if headers is not None:
            headers.append(request.headers)
        return answer(len(seen))

    async def list_models(_request: web.Request) -> web.Response:
        if isinstance(models, web.Response):
            return models
        if callable(models):
            return models()
        return web.json_response({"data": [{"id": name} for name in models]})

    async def measure() -> int:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/v1/chat/completions", handler)
        app.router.add_get("/v1/models", list_models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
        scheme = "https" if ssl_context else "http"
        url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lora-assignment=round-robin"], ["b", "a", "b", "a", "b", "a"]),
        ([], None),  # drawn
    ],
)
def test_sessions_ask_the_adapters_in_turn_or_at_random(options, expected):
    given = ["--num-prompts=6", "--max-concurrency=1", "--lora-modules", "b", "a", *options]
    models = ("m", "a", "b")
    status, seen = scripted(lambda _: stream(text("a")), *given, models=models)
    assert status == 0
    asked = [body["model"] for body in seen]
    assert asked == expected if expected else set(asked) == {"a", "b"}
    again = scripted(lambda _: stream(text("a")), *given, models=models)[1]
    plain = scripted(lambda _: stream(text("a")), *given[:2], models=models)[1]
    assert [body["model"] for body in again] == asked
    assert [body["prompt"] for body in plain] == [body["prompt"] for body in seen]


def test_an_adapter_that_the_server_does_not_have_is_one_line(server, capsys):
    line = failing(capsys, "--base-url", server.url, "--lora-modules", "nope")
    assert "the model nope does not exist" in line


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
    assert tree.tags["figure"] == 6
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


def test_headers_and_request_ids_reach_the_server(tmp_path):
    file, headers = tmp_path / "result.json", []
    status, _ = scripted(
        lambda _: stream(text("a")),
        "--header", "X-Tenant=blue", "X-Note=a=b", "--header", "Authorization=Token t",
        "--request-id-prefix=run7-", "--num-warmups=1", "--num-prompts=3", "--max-concurrency=1",
        "--save-detailed", f"--json={file}", headers=headers,
    )  # fmt: skip
    assert status == 0
    names = ("X-Tenant", "X-Note", "Authorization", "X-Request-Id")
    got = [tuple(map(each.get, names)) for each in headers]
    common = ("blue", "a=b", "Token t")
    assert got == [(*common, None), *((*common, f"run7-{i}") for i in range(3))]
    assert json.loads(file.read_text())["request_ids"] == ["run7-0", "run7-1", "run7-2"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--header=X-Tenant", "'X-Tenant' is no header; write X-Tenant=blue"),
        ("--header=a b=c", "'a b=c' is no header"),
        ("--percentile-metrics=ttft,rtt", "'rtt' is no latency; known are ttft, tpot, itl, e2el"),
        ("--metric-percentiles=50,101", "'50,101' has a percentile that is not from 0 to 100"),
        ("--metric-percentiles=50,", "'' is no number"),
    ],
)
def test_values_that_are_none_are_refused(capsys, option, message):
    with pytest.raises(SystemExit):
        main(["bench", "serve", option])
    assert message in capsys.readouterr().err


def test_printed_latencies_are_those_that_were_asked_for(tmp_path, capsys):
    file = tmp_path / "result.json"
    options = ["--percentile-metrics=e2el,ttft", "--metric-percentiles=25,99.9"]
    status, _ = scripted(
        lambda _: stream(text("a"), text("b")), "--num-prompts=2", *options, f"--json={file}"
    )
    assert status == 0
    out = capsys.readouterr().out
    assert re.search(r"^milliseconds +mean +p25 +p99\.9$", out, re.MULTILINE)
    assert re.findall(r"^(TTFT|TPOT|ITL|E2EL) ", out, re.MULTILINE) == ["TTFT", "E2EL"]
    result = json.loads(file.read_text())
    assert result["p25_itl_ms"] <= result["p50_itl_ms"] <= result["p99.9_itl_ms"]


def test_result_finds_a_name_itself(tmp_path, capsys):
    folder, file = tmp_path / "new" / "results", tmp_path / "also.json"
    options = ["--num-prompts=1", "--save-result", f"--result-dir={folder}"]
    answer = lambda _: stream(text("a"))  # noqa: E731
    assert scripted(answer, *options, "--max-concurrency=2", f"--json={file}")[0] == 0
    (named,) = folder.iterdir()
    assert re.fullmatch(r"paged-infqps-concurrency2-\d{8}-\d{6}\.json", named.name)
    assert named.read_text() == file.read_text()
    assert f"Written to {named}." in capsys.readouterr().err
    assert scripted(answer, *options, "--result-filename=mine.json")[0] == 0
    assert json.loads((folder / "mine.json").read_text())["completed"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--result-dir=x"], "--result-dir needs --save-result."),
        (["--result-filename=x"], "--result-filename needs --save-result."),
        (["--save-result", "--result-dir=/dev/null/x"], "cannot make --result-dir /dev/null/x: "),
    ],
)
def test_places_of_results_that_contradict_each_other_are_one_line(capsys, options, message):
    assert message in failing(capsys, "--base-url", "http://127.0.0.1:1", *options)


def test_rates_rise_by_equal_steps_or_equal_factors():
    assert ramp_rates("linear", 5, 1.0, 9.0).tolist() == [1, 3, 5, 7, 9]
    assert ramp_rates("exponential", 5, 1.0, 16.0).tolist() == pytest.approx([1, 2, 4, 8, 16])
    assert ramp_rates("linear", 1, 2.0, 9.0).tolist() == [2]


def test_requests_of_a_ramp_come_closer_and_closer(tmp_path, capsys):
    # Even gaps of 1/20, 1/40, 1/60, 1/80 and 1/100 second.
    file = tmp_path / "result.json"
    ramp = ["--ramp-up-strategy=linear", "--ramp-up-start-rps=20", "--ramp-up-end-rps=100"]
    options = ["--num-prompts=5", "--burstiness=inf", "--save-detailed", f"--json={file}"]
    assert scripted(lambda _: stream(text("a")), *ramp, *options)[0] == 0
    result = json.loads(file.read_text())
    assert result["ramp_up_strategy"] == "linear"
    assert re.search(r"Request rate configured \(RPS\): +20 to 100\n", capsys.readouterr().out)
    gaps = np.diff(sorted(result["start_times"]))
    # Sleeping may last longer than it was to, by as much as a busy machine likes.
    assert sum(gaps) > 1 / 40 + 1 / 60 + 1 / 80 + 1 / 100 - 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ramp-up-strategy=linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps."),
        (["--ramp-up-start-rps=1"], "need --ramp-up-strategy."),
        (
            ["--ramp-up-strategy=linear", "--ramp-up-start-rps=2", "--ramp-up-end-rps=2"],
            "--ramp-up-end-rps 2 must be finite and above --ramp-up-start-rps 2.",
        ),
        (
            ["--ramp-up-strategy=exponential", "--ramp-up-start-rps=1", "--ramp-up-end-rps=2",
             "--request-rate=3"],
            "--ramp-up-strategy sets the rate; leave --request-rate out.",
        ),
    ],
)  # fmt: skip
def test_ramps_that_contradict_themselves_are_one_line(capsys, options, message):
    status, seen = scripted(lambda _: stream(text("a")), *options)
    assert (status, seen) == (1, [])
    assert message in capsys.readouterr().err


def test_server_that_is_not_ready_is_waited_for(capsys):
    asked = []

    def models() -> web.Response:
        asked.append(1)
        if len(asked) == 1:
            return web.Response(status=503)
        return web.json_response({"data": [{"id": "m"}]})

    options = ["--num-prompts=1"]
    answer = lambda _: stream(text("a"))  # noqa: E731
    assert scripted(answer, *options, "--ready-check-timeout-sec=30", models=models)[0] == 0
    assert len(asked) == 2
    asked.clear()
    assert scripted(answer, *options, models=models)[0] == 1, "by default nobody waits"
    assert "does not name its models" in capsys.readouterr().err


def test_waiting_for_a_server_comes_to_an_end(capsys):
    line = failing(capsys, "--base-url=http://127.0.0.1:1", "--ready-check-timeout-sec=0.6")
    assert "no server answers at http://127.0.0.1:1" in line


def test_certificate_that_nobody_vouches_for_is_taken_if_asked_to(capsys, certificate):
    context = make_ssl_context(certificate)
    options = ["--num-prompts=1", "--model=m"]
    answer = lambda _: stream(text("a"))  # noqa: E731
    assert scripted(answer, *options, "--insecure", ssl_context=context)[0] == 0
    assert scripted(answer, *options, ssl_context=context)[0] == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


def test_server_by_host_and_port_and_api_by_backend(server, tmp_path):
    file, number = tmp_path / "result.json", server.url.rpartition(":")[2]
    options = [*SMALL, "--num-prompts=1", f"--json={file}", "--backend=openai-chat"]
    assert main(["bench", "serve", "--host=127.0.0.1", f"--port={number}", *options]) == 0
    result = json.loads(file.read_text())
    assert (result["base_url"], result["endpoint"]) == (server.url, "/v1/chat/completions")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url=http://a", "--port=1"], "--host and --port take the place of --base-url"),
        (
            ["--backend=vllm", "--endpoint=/v1/chat/completions"],
            "--backend vllm is /v1/completions, not /v1/chat/completions.",
        ),
        (["--host=::1", "--port=1"], "no server answers at http://[::1]:1"),
        (["--host=127.0.0.1", "--port=1"], "no server answers at http://127.0.0.1:1"),
    ],
)
def test_servers_that_contradict_themselves_or_are_not_there_are_one_line(capsys, options, message):
    assert message in failing(capsys, *options)
