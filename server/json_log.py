"""`JsonFormatter`: log records as one JSON object per line, for what collects logs."""

import datetime
import json
import logging
from contextvars import ContextVar

TRACE_ID: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""Trace of the HTTP request that is being served, in hex; set where requests are traced."""

# What every record has; the rest came as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats records as JSON: time, level, logger, message, `extra`, trace and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (trace_id := TRACE_ID.get()) is not None:
            fields["trace_id"] = trace_id
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
