"""What is measured: shapes of jobs, who does them, the figure that counts, and the targets."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.protocol import Job, Outcome

# Ids below are special tokens in the demo model, and single bytes in most vocabularies.
_FIRST_TOKEN_ID = 300


@dataclass(frozen=True)
class Shape:
    """Equal prompts, in numbers of tokens."""

    num_prompts: int
    input_len: int
    output_len: int

    def job(self, seed: str, vocab_size: int) -> Job:
        """Return random prompts; the same seed gives the same ones."""
        draw = random.Random(f"{seed} {self}")
        prompts = [
            [draw.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]
        return Job(prompts, self.output_len)


type Figure = Callable[[Sequence[Shape], Sequence[Outcome]], float]
"""What a run comes to: the outcomes, one per shape, as one number."""


def output_rate(shapes: Sequence[Shape], outcomes: Sequence[Outcome]) -> float:
    """Output tokens per second."""
    return sum(sum(o.output_lens) for o in outcomes) / sum(o.seconds for o in outcomes)


def total_rate(shapes: Sequence[Shape], outcomes: Sequence[Outcome]) -> float:
    """Prompt and output tokens per second."""
    num_prompt_tokens = sum(shape.num_prompts * shape.input_len for shape in shapes)
    num_output_tokens = sum(sum(outcome.output_lens) for outcome in outcomes)
    return (num_prompt_tokens + num_output_tokens) / sum(o.seconds for o in outcomes)


def seconds(shapes: Sequence[Shape], outcomes: Sequence[Outcome]) -> float:
    """Seconds until the last token."""
    return sum(outcome.seconds for outcome in outcomes)


def decode_rate(shapes: Sequence[Shape], outcomes: Sequence[Outcome]) -> float:
    """Tokens per second of one stream after its first token."""
    (outcome,) = outcomes
    return 1 / _step_seconds(outcome)


def context_growth(shapes: Sequence[Shape], outcomes: Sequence[Outcome]) -> float:
    """What a byte of KV costs a step between the two longer contexts, by that of the shorter two.

    All prompts are equally many, so live KV grows as the contexts do: a step whose cost grows with
    the bytes that it has to read, and with nothing else, comes to 1.
    """
    contexts = [shape.input_len for shape in shapes]
    steps = [_step_seconds(outcome) for outcome in outcomes]
    short, long = ((steps[i + 1] - steps[i]) / (contexts[i + 1] - contexts[i]) for i in range(2))
    return long / short


def _step_seconds(outcome: Outcome) -> float:
    if outcome.decode_step_seconds is None:
        raise ValueError("the engine does not tell its decode steps' time")
    return outcome.decode_step_seconds


@dataclass(frozen=True)
class Workload:
    """One row of the table, or one per peer.

    Attributes:
      name: for the command line.
      shapes: jobs of a run, one after the other.
      ours: competitor that is ours.
      peers: competitors that it is compared with.
      figure: what a run comes to.
      unit: of the figure.
      is_lower_better: whether a lower figure is the better one.
      must, goal: of the ratio to the first peer (how many times better), or, where `bounds_figure`
        is set, of our figure itself; None: none set.
    """

    name: str
    shapes: tuple[Shape, ...]
    ours: str
    peers: tuple[str, ...]
    figure: Figure
    unit: str
    is_lower_better: bool = False
    must: float | None = None
    goal: float | None = None
    bounds_figure: bool = False


_DECODE = (Shape(1, 128, 128),)
_PROMPT = (Shape(1, 1024, 1),)

WORKLOADS = (
    Workload(
        "1x128/128", _DECODE, "paged", ("vllm", "transformers"), output_rate, "output tok/s",
        must=1.5, goal=2.2,
    ),
    Workload(
        "16x128/128", (Shape(16, 128, 128),), "paged", ("vllm", "transformers"), output_rate,
        "output tok/s", must=1.8, goal=2.5,
    ),
    Workload(
        "64x128/128", (Shape(64, 128, 128),), "paged", ("vllm",), output_rate, "output tok/s",
        must=1.8, goal=2.5,
    ),
    Workload(
        "8x1024/32", (Shape(8, 1024, 32),), "paged", ("vllm",), total_rate, "total tok/s",
        must=1.8, goal=2.3,
    ),
    Workload(
        "ttft-1024", _PROMPT, "paged", ("vllm", "transformers"), seconds, "s",
        is_lower_better=True, must=1.5, goal=2.0,
    ),
    Workload(
        "prefill-128", (Shape(1, 128, 1),), "paged", ("llama.cpp",), seconds, "s",
        is_lower_better=True, must=4.0, goal=6.0,
    ),
    Workload("decode-bf16", _DECODE, "paged", ("llama.cpp",), decode_rate, "decode tok/s"),
    Workload(
        "decode-int8", _DECODE, "paged-int8", ("llama.cpp",), decode_rate, "decode tok/s",
        must=1.0, goal=1.3,
    ),
    Workload(
        "context-growth", tuple(Shape(16, length, 48) for length in (256, 1024, 4096)),
        "paged-long", (), context_growth, "x per byte of KV", is_lower_better=True,
        must=1.5, goal=1.2, bounds_figure=True,
    ),
    Workload(
        "http-16", (Shape(16, 128, 128),), "paged-server", ("vllm-server",), output_rate,
        "output tok/s", must=1.8, goal=2.5,
    ),
    Workload(
        "http-64", (Shape(64, 128, 128),), "paged-server", ("vllm-server",), output_rate,
        "output tok/s", must=1.8, goal=2.5,
    ),
    Workload(
        "ready", (Shape(1, 16, 1),), "paged-start", ("vllm-start",), seconds, "s",
        is_lower_better=True, must=15.0, goal=6.0, bounds_figure=True,
    ),
)  # fmt: skip


def workloads_named(names: str) -> list[Workload]:
    """Return the workloads of a list with commas, in our order; "all" is all.

    Raises: ValueError for a name that there is not.
    """
    wanted = set(names.split(","))
    known = [workload.name for workload in WORKLOADS]
    if unknown := wanted - {"all", *known}:
        raise ValueError(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    return [workload for workload in WORKLOADS if wanted & {"all", workload.name}]
