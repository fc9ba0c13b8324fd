"""`/openapi.json` is true: requests generated from it break nothing, and the answers fit it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ",".join(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    ]
)


def run_schemathesis(url: str, folder: Path, *options: str) -> int:
    """Return how many requests schemathesis has made without finding anything."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--checks", CHECKS, "--no-color", "--generation-deterministic"]
    # Long: a machine may be busy, and this is no test of speed.
    command += ["--request-timeout", "200"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.e2e.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    # The folder is empty: neither settings nor examples of an earlier run are found.
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=os.environ | hooks,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout
    return int(found[1])


def num_answered(url: str) -> float:
    """Return how many samples have ended by themselves or by their limit."""
    page = httpx.get(f"{url}/metrics", timeout=200).text
    found = re.findall(
        r'^vllm:request_success_total.*reason="(?:stop|length)".* (\S+)$', page, re.M
    )
    return sum(map(float, found))


def test_generated_requests_find_nothing_wrong(tiny_url, tmp_path):
    assert run_schemathesis(tiny_url, tmp_path, "--phases", "fuzzing", "-n", "15") >= 100
    assert num_answered(tiny_url) >= 20, "some of them reach the engine"


@pytest.mark.slow
def test_2000_generated_requests_find_nothing_wrong(tiny_url, tmp_path):
    options = ["--phases", "coverage,fuzzing", "-n", "100"]
    assert run_schemathesis(tiny_url, tmp_path, *options) >= 2000


def test_the_document_names_every_route(tiny_url):
    paths = httpx.get(f"{tiny_url}/openapi.json", timeout=200).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/load", "/ping"} <= set(paths)
