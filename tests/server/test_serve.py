"""`paged serve` as a process: the port first, then the model; signals; exit status."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paged.scheduler.errors import CapacityError
from paged.server.cli import main
from paged.server.cli_errors import UserError
from paged.server.cli_serve import reserve_port, serve_until_stopped
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.process import ROOT, ServerProcess, fake_server

LONG = {"prompt": "a", "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def generating(running: ServerProcess, num_tokens: int) -> Iterator[Iterator[str]]:
    """Start a stream and yield its lines, the first one already taken."""
    body = {**LONG, "max_tokens": num_tokens}
    with running.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_an_idle_server_exits_with_0(tmp_path, number):
    with fake_server(tmp_path) as running:
        assert running.http.get("/health").status_code == 200
        running.process.send_signal(number)
        assert running.exit_status() == 0


def test_signal_drains_running_requests_and_refuses_new_ones(tmp_path):
    with fake_server(tmp_path) as running, generating(running, 300) as lines:
        running.process.send_signal(signal.SIGTERM)
        next(lines)
        assert wait_for_status(running, 503)
        refused = running.http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert running.exit_status() == 0


def test_second_signal_ends_running_requests_with_an_error(tmp_path):
    with fake_server(tmp_path) as running, generating(running, 50_000) as lines:
        running.process.send_signal(signal.SIGTERM)
        assert wait_for_status(running, 503)
        running.process.send_signal(signal.SIGTERM)
        assert_ends_with_error(lines)
        assert running.exit_status() == 0


def test_timeout_ends_running_requests_with_an_error(tmp_path):
    with fake_server(tmp_path, 0.1) as running, generating(running, 50_000) as lines:
        running.process.send_signal(signal.SIGTERM)
        assert_ends_with_error(lines)
        assert running.exit_status() == 0


def wait_for_status(running: ServerProcess, status: int) -> bool:
    return any(running.http.get("/health").status_code == status for _ in range(2000))


def assert_ends_with_error(lines: Iterator[str]) -> None:
    *_, error, done = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"


def test_port_in_use_fails_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = main(["serve", "no-such-model", "--host", "127.0.0.1", "--port", str(port)])
    assert status == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"paged: error: port {port} on 127.0.0.1 is already in use; stop the program that uses "
        "it, or choose another one with --port."
    )


def test_reserved_port_is_refused_to_clients_until_it_listens():
    with reserve_port("127.0.0.1", 0) as listener:
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(listener.getsockname())
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            pass


def test_reserved_port_cannot_be_taken_by_others():
    with (
        reserve_port("127.0.0.1", 0) as listener,
        socket.socket() as other,
        pytest.raises(OSError, match="Address already in use"),
    ):
        other.bind(listener.getsockname())


def test_port_can_be_reused_right_after_a_server_has_closed_it():
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = first.getsockname()
        with socket.create_connection(address):
            first.accept()[0].close()  # leaves the server's side in TIME_WAIT
    with reserve_port(*address):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "::zz"])
def test_wrong_host_is_one_line(host):
    with pytest.raises(UserError, match=rf"cannot listen on {re.escape(host)}:0: "):
        reserve_port(host, 0)


def test_ipv6_address_is_understood():
    try:
        with reserve_port("::1", 0) as listener:
            assert listener.family == socket.AF_INET6
    except UserError:
        pytest.skip("this machine has no IPv6")


def test_program_that_listens_first_on_a_port_that_both_reserved_wins():
    async def start() -> FakeEngine:
        return engine

    engine = FakeEngine()
    with reserve_port("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with reserve_port("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is already in use"):
                asyncio.run(
                    serve_until_stopped(start, ServerSettings(), second, shutdown_timeout=1)
                )
    assert engine.health is not None, "the engine was not shut down"


def test_engine_that_cannot_start_is_one_line():
    async def start() -> FakeEngine:
        raise CapacityError("The KV cache holds 3 blocks, one request needs 4.")

    with (
        reserve_port("127.0.0.1", 0) as listener,
        pytest.raises(UserError, match="holds 3 blocks"),
    ):
        asyncio.run(serve_until_stopped(start, ServerSettings(), listener, shutdown_timeout=1))


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("serve --host 127.0.0.1 --port 0", signal.SIGINT),
        ("serve --host 127.0.0.1 --port 0", signal.SIGTERM),
        ("chat -q Hi", signal.SIGINT),
    ],
)
def test_signal_while_loading_does_not_wait_for_the_model(command, number):
    # Stands in for the loader, which imports JAX: it says that it was called, and blocks.
    script = (
        "import sys, time, types\n"
        "def load_engine(*args, **kwargs):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(600)\n"
        "module = types.SimpleNamespace(load_engine=load_engine, AsyncEngine=None)\n"
        "sys.modules['paged.scheduler.loading'] = module\n"
        "sys.modules['paged.scheduler.async_engine'] = module\n"
        "from paged.server.cli import main\n"
        f"sys.exit(main({command.split()!r}))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(timeout=60) == 130
            assert process.stderr.read().splitlines()[-1] == "paged: stopped while loading"
        finally:
            process.kill()
