"""The built-in traces by name."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paged.scheduler.simulator.arrivals import sharegpt
from paged.scheduler.simulator.conversation_traces import agent_tree, chat
from paged.scheduler.simulator.document_traces import cyclic, sawtooth, scan, working_set, zipf
from paged.scheduler.simulator.trace import Trace

_BURSTY = 0.25

TRACES: Mapping[str, Callable[..., Trace]] = {
    "cyclic": cyclic,
    "sawtooth": sawtooth,
    "zipf": zipf,
    "scan": scan,
    "working-set": working_set,
    "chat": chat,
    "agent-tree": agent_tree,
    "poisson": sharegpt,
    "bursty": partial(sharegpt, burstiness=_BURSTY),
}
"""Generators; their keyword arguments are the options of `make_trace`."""


def make_trace(name: str, **options: Any) -> Trace:
    """Return a built-in trace.

    Raises: ValueError for an unknown name, an option that the trace does not have, or a bad value.
    """
    if name not in TRACES:
        raise ValueError(f"trace {name!r} is unknown; built in are {', '.join(TRACES)}.")
    known = inspect.signature(TRACES[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"trace {name!r} has no {option}; it has {', '.join(known)}.")
    return TRACES[name](**options)
