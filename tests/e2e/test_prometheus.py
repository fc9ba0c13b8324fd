"""deploy/: the queries of the dashboard, and the alerts, in a real Prometheus that scrapes us."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"missing tool: {name}, of Debian's package prometheus")
    return path


@pytest.fixture(scope="module")
def prometheus(tiny_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server every second."""
    program, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus-rules.yml")],
        "scrape_configs": [
            {
                "job_name": "paged",
                "static_configs": [{"targets": [tiny_url.removeprefix("http://")]}],
            }
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as holder:
        # Nobody else gets the port by chance; Prometheus, which asks for it, sets this option too.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        command = [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not is_ready(f"http://{address}"):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def query(url: str, expression: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def dashboard_queries() -> dict[str, str]:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    return {
        f"{panel['title']}, {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }


def in_prometheus(expression: str) -> str:
    """Replace what Grafana would."""
    expression = expression.replace("$__rate_interval", "30s").replace("$model_name", ".*")
    assert "$" not in expression
    return expression


def test_every_panel_shows_data(prometheus, tiny_url):
    def serve_some() -> None:
        body = {"prompt": list(range(3, 60)), "max_tokens": 8, "ignore_eos": True}
        httpx.post(f"{tiny_url}/v1/completions", json=body, timeout=120).raise_for_status()

    queries = {name: in_prometheus(expr) for name, expr in dashboard_queries().items()}
    # A series that has its first increase with its first scrape has a rate from the third on.
    deadline = time.monotonic() + 300
    empty = queries
    while empty and time.monotonic() < deadline:
        serve_some()
        time.sleep(0.5)
        empty = {name: expr for name, expr in empty.items() if not query(prometheus, expr)}
    assert not empty
    rate = query(prometheus, queries["Output tokens per second, "])
    assert float(rate[0]["value"][1]) > 0


def test_alerts_are_loaded_and_can_be_evaluated(prometheus):
    def healths() -> list[str]:
        groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=60).json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    while "unknown" in (found := healths()):
        time.sleep(0.2)
    assert found == ["ok"] * 4


def test_alerts_tell_the_diagnoses_apart(data_dir, tmp_path):
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule.pop("annotations").keys() == {"summary", "description"}
    # Without its sentences, which would have to stand in the test once more.
    (tmp_path / "prometheus-rules.yml").write_text(yaml.safe_dump(rules))
    shutil.copy(data_dir / "prometheus_rules_test.yml", tmp_path)
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "prometheus_rules_test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_configuration_is_valid():
    command = [tool("promtool"), "check", "config", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_uses_no_metric_twice_under_one_name():
    # Titles are what people find panels by.
    names = [name for name in dashboard_queries() if not name.endswith(", ")]
    assert len(names) == len(set(names))
    assert all(re.search(r"(vllm|paged):", expr) for expr in dashboard_queries().values())
