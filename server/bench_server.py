"""A `paged serve` for as long as a measurement takes."""

import contextlib
import http.client
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from paged.server.cli_errors import UserError

_POLL_SECONDS = 0.1
_STOP_SECONDS = 30.0


@contextlib.contextmanager
def started_server(arguments: str, options: Sequence[str], timeout: float) -> Iterator[str]:
    """Start `paged serve` on a free port; yield its address when it is ready, stop it afterwards.

    Args:
      arguments: of the command, as in a shell.
      options: further ones, one each.
      timeout: seconds until it must be ready.

    Raises: UserError if it ends before that, or is too slow; with the last line it wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paged.server.cli", "serve", *shlex.split(arguments)]
    command += [*options, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="paged-bench-") as folder:
        log = pathlib.Path(folder, "log")
        with log.open("wb") as file:
            # In a session of its own: Ctrl-C ends the measurement first, and then the server.
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, timeout, log, shlex.join(["paged", *command[3:]]))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(
    process: "subprocess.Popen[bytes]", url: str, timeout: float, log: pathlib.Path, shown: str
) -> None:
    deadline = time.monotonic() + timeout
    while not _is_ready(url):
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            what = f"was not ready after {timeout:g} s" if status is None else f"ended ({status})"
            lines = log.read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
            raise UserError(f"`{shown}` {what}{last}")
        time.sleep(_POLL_SECONDS)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
