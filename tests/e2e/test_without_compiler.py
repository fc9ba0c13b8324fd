"""`paged serve` on a machine without a C++ compiler: it works, and says what it lacks."""

import pathlib
import re
import subprocess
import sys
import time

import httpx

from tests.server.process import ROOT


def test_a_server_without_a_compiler_serves_and_says_what_it_lacks(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "log"
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--max-model-len", "32"]
    cache = ["--native-cache-dir", str(tmp_path / "cache"), "--no-compilation-cache"]
    address = ["--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "paged.server.cli", "serve", str(tiny_model)]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": str(tmp_path)}
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, *limits, *cache, *address], cwd=ROOT, env=environment, stderr=file
        ) as process,
    ):
        try:
            while not (found := re.search(r"Serving on (http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            body = {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=200)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
        finally:
            process.kill()
    text = log.read_text()
    assert text.count("No native CPU kernels: there is no C++ compiler; install g++") == 1
    assert "slower" in text
    assert not (tmp_path / "cache").exists()
