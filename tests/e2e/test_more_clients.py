"""langchain-openai and litellm, which are too large for the environment of the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"  # where no test of the sources looks
PACKAGES = ("langchain-openai==1.7.4", "litellm==1.110.2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_langchain_and_litellm_stream_call_tools_and_get_json(tiny_url):
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    done = subprocess.run(
        [python, str(HERE / "more_clients.py"), tiny_url],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for client in ("langchain", "litellm"):
        assert 1 <= seen[client]["tokens"] <= 100
        assert seen[client]["call"] == seen[client]["streamed_call"] == ["weather", {}]
        assert seen[client]["verdict"] in ("yes", "no")
    assert seen["langchain"]["vectors"] == [64, 64]
