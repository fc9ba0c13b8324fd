"""`paged chat` and `paged generate`, against a server and around an engine of their own."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import time

import pytest
from aiohttp import web

from paged.server import cli_engine
from paged.server.cli import main
from paged.server.cli_errors import UserError
from paged.server.client import Client
from tests.server.fake_engine import FakeEngine
from tests.server.process import ROOT, ServerProcess, fake_server

ANSWER = "The answer is 42."


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> ServerProcess:
    with fake_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_quick_chat_prints_the_answer(server, capsys, suffix):
    assert main(["chat", "--url", server.url + suffix, "-q", "Hi"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_sampling_options_reach_the_server(server, capsys):
    options = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5"]
    seed = ["--sampling-seed", "1", "--stop", "zzz"]
    assert main(["chat", "--url", server.url, "-q", "Hi", *options, *seed]) == 0
    assert capsys.readouterr().out == "The\n"


def test_conversation_goes_on_until_the_input_ends(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n   \nAgain\n"))
    assert main(["chat", "--url", server.url, "--system-prompt", "Be brief."]) == 0
    # Two empty lines in between are asked again.
    assert capsys.readouterr().out == f"> {ANSWER}\n> > > {ANSWER}\n> \n"


def test_conversation_is_remembered(monkeypatch, capsys):
    seen = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        chunk = {"choices": [{"delta": {"content": f"answer {len(seen)}"}}]}
        text = f": comment\n\ndata: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def converse() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        arguments = ["chat", "some-model", "--url", url, "--system-prompt", "S"]
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
        assert await asyncio.to_thread(main, arguments) == 0
        await runner.cleanup()

    asyncio.run(converse())
    assert [m["content"] for m in seen[1]["messages"]] == ["S", "one", "answer 1", "two"]
    assert seen[1]["model"] == "some-model"
    assert capsys.readouterr().out == "> answer 1\n> answer 2\n> \n"


def test_generate_prints_the_continuation(server, capsys):
    assert main(["generate", "--url", server.url, "--prompt", "Hi", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "The a\n"


def test_generate_takes_the_prompt_from_standard_input(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    assert main(["generate", "--url", server.url]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_generate_without_prompt_says_what_to_do(capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["generate"]) == 1
    assert "paged: error: there is no prompt; give --prompt TEXT" in capsys.readouterr().err


def test_several_prompts_are_printed_in_order(server, capsys):
    prompts = ["-p", "one", "-p", "two", "-p", "three"]
    assert main(["generate", "--url", server.url, *prompts, "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "The\nThe\nThe\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--url", "localhost:8000"],
            "--url localhost:8000 is no address; write http://HOST:PORT/v1.",
        ),
        (["--url", "http://"], "--url http:// is no address"),
        (["--url", "http://[::1"], "--url http://[::1 is no address"),
        (["--url", "http://127.0.0.1:1"], "Cannot connect to host 127.0.0.1:1"),
    ],
)
def test_unreachable_server_is_one_line(capsys, arguments, message):
    assert main(["chat", "-q", "Hi", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paged: error: ")
    assert message in line


def test_refusal_of_the_server_is_one_line(server, capsys):
    assert main(["chat", "other-model", "--url", server.url, "-q", "Hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("paged: error: The model `other-model` does not exist. Valid aliases: tiny.")


def test_foreign_error_page_is_one_line(server, capsys):
    assert main(["chat", "--url", server.url + "/nowhere", "-q", "Hi"]) == 1
    assert "There is no route POST /nowhere/chat/completions" in capsys.readouterr().err


def test_error_in_mid_stream_is_one_line(capsys):
    engine = FakeEngine(fail_after=3)

    async def talk() -> None:
        async with cli_engine.serve_privately(engine) as client:
            async for piece in client.chat([{"role": "user", "content": "Hi"}], {}):
                print(piece, end="")

    with pytest.raises(UserError, match="The engine has failed: scripted"):
        asyncio.run(talk())
    assert capsys.readouterr().out == "The"


@pytest.fixture
def teapot(tmp_path):
    script = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_POST(self):\n"
        "        self.send_response(418)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(b'short and stout')\n"
        "s = h.HTTPServer(('127.0.0.1', 0), H)\n"
        "print(s.server_port, flush=True)\n"
        "s.serve_forever()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.kill()


def test_answer_that_is_no_api_is_one_line(teapot):
    async def talk() -> None:
        async with Client(teapot) as client:
            async for _ in client.chat([], {}):
                pass

    with pytest.raises(UserError, match="status 418: short and stout"):
        asyncio.run(talk())


def test_private_server_needs_its_key_and_ends_with_its_client():
    engine = FakeEngine()

    async def talk() -> tuple[str, str]:
        async with cli_engine.serve_privately(engine) as client:
            pieces = [p async for p in client.chat([{"role": "user", "content": "Hi"}], {})]
            url = str(client.url)
            async with Client(url) as stranger:
                with pytest.raises(UserError, match="Missing or wrong API key"):
                    _ = [p async for p in stranger.chat([], {})]
        async with Client(url) as late:
            with pytest.raises(UserError, match="Cannot connect"):
                _ = [p async for p in late.chat([], {})]
        return "".join(pieces), url

    text, url = asyncio.run(talk())
    assert text == ANSWER
    assert url.startswith("http://127.0.0.1:")


def test_interrupted_answer_ends_in_the_server_and_the_conversation_goes_on(tmp_path):
    with fake_server(tmp_path, answer="a" * 50_000) as running:
        command = [sys.executable, "-m", "paged.server.cli", "chat", "--url", running.url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT, bufsize=0, **pipes) as chat:
            try:
                chat.stdin.write(b"Hi\n")
                read_until(b"a", chat.stdout)
                chat.send_signal(signal.SIGINT)
                read_until(b"]", chat.stdout)
                wait_until_idle(running)
                chat.stdin.close()
                assert chat.wait(timeout=60) == 0
                assert chat.stdout.read() == b"\n> \n"
                assert chat.stderr.read() == b""
            finally:
                chat.kill()


def read_until(byte: bytes, file: io.RawIOBase) -> None:
    while (got := file.read(1)) != byte:
        assert got, "the output ended"


def wait_until_idle(running: ServerProcess) -> None:
    for _ in range(10_000):
        if running.http.get("/load").json() == {"server_load": 0}:
            return
        time.sleep(0.02)
    raise AssertionError("the server goes on generating")


def test_commands_load_the_model_themselves_without_url(monkeypatch, capsys):
    engine = FakeEngine()

    async def start_engine(args, config):
        assert (args.model, config.max_model_len) == ("my-model", 2000)
        return engine

    monkeypatch.setattr(cli_engine, "start_engine", start_engine)
    arguments = ["chat", "my-model", "-q", "Hi", "--max-model-len", "2k", "--max-tokens", "3"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == "The\n"
    assert captured.err == "Loading my-model ...\n"
    assert engine.health is not None, "the engine was not shut down"


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_model_that_does_not_exist_is_one_line(command):
    options = {
        "serve": ["--host", "127.0.0.1", "--port", "0"],
        "chat": ["-q", "x"],
        "generate": ["-p", "x"],
    }[command]
    # In a process of its own: JAX must not be in memory before, as in a user's shell.
    run = subprocess.run(
        [sys.executable, "-m", "paged.server.cli", command, "no/such/folder/x.gguf", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.splitlines()[-1].startswith(
        "paged: error: no/such/folder/x.gguf does not exist; pass a local directory"
    )
    assert "Traceback" not in run.stderr
