"""How the process of an engine talks to the one that measures: one line of JSON each way.

Engines live in environments of their own, some with an older Python: this file and the adapters
need nothing but Python 3.11, its standard library and the engine.

The first line that an engine writes is `{"ready": {...}}`; then each line that it reads is a `Job`,
answered by an `Outcome`. Whatever goes wrong is `{"error": "..."}` instead.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Settings:
    """What an engine is loaded with.

    Attributes:
      model: path of the weights, in the form that the engine reads.
      threads: cores that it may use.
      max_model_len: longest prompt plus output, tokens.
      options: what only this engine knows.
    """

    model: str
    threads: int
    max_model_len: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Prompts that are handed over at once, and by how many tokens each is to be continued."""

    prompts: list[list[int]]
    output_len: int


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
      seconds: from the hand-over of all prompts to the last token.
      output_lens: tokens generated, one number per prompt.
      first_tokens: first generated token of each prompt; empty if the engine does not tell.
      decode_step_seconds: mean time of the steps that decoded for all prompts; None if there were
        none or the engine does not tell.
    """

    seconds: float
    output_lens: list[int]
    first_tokens: list[int] = field(default_factory=list)
    decode_step_seconds: float | None = None


class Engine(Protocol):
    """A loaded model that decodes greedily and goes on past the end of a text."""

    def run(self, job: Job) -> Outcome:
        """Generate for all prompts."""
        ...


def decode_step_seconds(arrivals: Iterable[Sequence[float]]) -> float | None:
    """Return the mean time of the steps that decoded for all prompts.

    Args:
      arrivals: for each prompt, when its tokens came; those of one step at the same moment.
    """
    prompts = list(arrivals)
    start, end = max(p[0] for p in prompts), min(p[-1] for p in prompts)
    steps = sorted({arrival for p in prompts for arrival in p if start <= arrival <= end})
    return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else None


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the installed versions."""
    return {name: importlib.metadata.version(name) for name in distributions}


def serve(load: Callable[[Settings], Engine], *distributions: str) -> None:
    """Load the engine that the first argument of the command line describes, then do jobs.

    Args:
      load: makes the engine.
      distributions: whose versions are reported.
    """
    # Whatever the engine prints goes to its log; only answers go to the standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        started = time.perf_counter()
        engine = load(Settings(**json.loads(sys.argv[1])))
        seconds = time.perf_counter() - started
        answer({"ready": {"load_seconds": seconds, "versions": versions_of(*distributions)}})
    except Exception as error:
        answer({"error": _text(error)})
        raise
    for line in sys.stdin:
        try:
            outcome = engine.run(Job(**json.loads(line)))
        except Exception as error:
            answer({"error": _text(error)})
        else:
            answer(asdict(outcome))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
