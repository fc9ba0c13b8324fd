"""`/openapi.json` is true: what is generated from it never breaks the server, and answers fit it."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

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
    command += ["--checks", CHECKS, "--seed", "1", "--no-color", "--generation-deterministic"]
    # The folder is empty: neither settings nor examples of an earlier run are found.
    done = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout
    return int(found[1])


def test_generated_requests_find_nothing_wrong(tiny_url, tmp_path):
    assert run_schemathesis(tiny_url, tmp_path, "--phases", "fuzzing", "-n", "10") >= 100


@pytest.mark.slow
def test_2000_generated_requests_find_nothing_wrong(tiny_url, tmp_path):
    options = ["--phases", "examples,coverage,fuzzing,stateful", "-n", "100"]
    assert run_schemathesis(tiny_url, tmp_path, *options) >= 2000


def test_the_document_names_every_route(tiny_url):
    paths = httpx.get(f"{tiny_url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/load", "/ping"} <= set(paths)
