"""Seconds from `paged serve` to the first token of a chat, cold (empty caches) and warm.

    python benchmarks/startup.py

The model file is fetched beforehand; the compile cache is a temporary folder, empty at the first
start and filled at the second.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request


def chat(port: int) -> str:
    """Return the answer to a short question; raises OSError until the server listens."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def first_token_seconds(arguments: list[str]) -> float:
    """Start a server, wait for its first token, stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paged.server.cli", "serve", "--host", "127.0.0.1"]
    started = time.perf_counter()
    server = subprocess.Popen([*command, "--port", str(port), *arguments])
    try:
        while server.poll() is None:
            try:
                chat(port)
                return time.perf_counter() - started
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise SystemExit(f"the server exited with {server.returncode}")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", nargs="*", help="further arguments of `paged serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm", "warm again"):
            seconds = first_token_seconds([*args.arguments, "--compilation-cache-dir", cache])
            print(f"{name}: first token after {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
