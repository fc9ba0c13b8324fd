"""A server of the fake engine in a process of its own."""

import contextlib
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

ROOT = pathlib.Path(__file__).parents[2]


class ServerProcess:
    """A running server: its process, its address, and an HTTP client of it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=200)

    def exit_status(self) -> int:
        return self.process.wait(timeout=200)


@contextlib.contextmanager
def fake_server(
    folder: pathlib.Path, shutdown_timeout: float = 20, answer: str = "The answer is 42."
) -> Iterator[ServerProcess]:
    """Start a server that logs into `folder`; kill it at the end if it still runs."""
    command = [sys.executable, "-m", "tests.server.serve_fake", str(shutdown_timeout), answer]
    log = folder / "log"
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            while not (found := re.search(r"Serving on (http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            running = ServerProcess(process, found[1])
            with running.http:
                yield running
        finally:
            process.kill()
