"""What the log says of requests, and logs as JSON."""

import json
import logging
import subprocess
import sys

import pytest

from paged.server.json_log import TRACE_ID, JsonFormatter
from paged.server.observability import ObservabilitySettings
from tests.server.process import ROOT
from tests.server.serving import COMPLETIONS, ok


def as_json(**fields) -> dict:
    record = logging.makeLogRecord(
        {"name": "paged.x", "levelname": "INFO", "msg": "a %s\nb", "args": ("é",), "created": 0.25}
        | fields
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_record_is_one_line_of_json():
    assert as_json(request_id="r1", size=3) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "INFO",
        "logger": "paged.x",
        "message": "a é\nb",
        "request_id": "r1",
        "size": 3,
    }


def test_a_record_names_the_trace_that_it_belongs_to():
    token = TRACE_ID.set("0af7")
    try:
        assert as_json()["trace_id"] == "0af7"
    finally:
        TRACE_ID.reset(token)
    assert "trace_id" not in as_json()


def test_a_record_carries_its_exception():
    try:
        raise ValueError("no")
    except ValueError:
        assert as_json(exc_info=sys.exc_info())["exception"].endswith("ValueError: no")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_format_is_that_of_standard_error(log_format):
    code = (
        "import logging\n"
        "from paged.server.cli_settings import set_up_logging\n"
        f"set_up_logging('info', {log_format!r})\n"
        "logging.getLogger('paged.x').info('hello')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = run.stderr.splitlines()
    if log_format == "json":
        assert json.loads(line)["message"] == "hello"
    else:
        assert line.startswith("INFO ")
        assert line.endswith(" paged.x: hello")


@pytest.mark.parametrize(
    ("max_log_len", "shown"),
    [
        (None, "'very secret', token ids: [118, 101, 114, 121, 32"),
        (4, "'very', token ids: [118, 101, 114, 121]."),
        (0, "'', token ids: []."),
    ],
)
def test_prompts_are_logged_at_debug_level_only_and_cut(caplog, max_log_len, shown):
    caplog.set_level("DEBUG", logger="paged.server.request_log")
    settings = ObservabilitySettings(max_log_len=max_log_len)
    body = {"prompt": "very secret", "request_id": "r1"}
    ok(COMPLETIONS, body, log_requests=True, observability=settings)
    records = [r for r in caplog.records if r.name == "paged.server.request_log"]
    assert [record.levelname for record in records] == ["INFO", "DEBUG"]
    assert "secret" not in records[0].getMessage()
    assert f"Request cmpl-r1, prompt 0: {shown}" in records[1].getMessage()
    assert [record.request_id for record in records] == ["cmpl-r1"] * 2
