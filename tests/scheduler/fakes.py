"""A runner without a model, and an engine around it that speaks bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import InputProcessor
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.engine import Engine
from paged.scheduler.output import ModelRunnerOutput, RunnerLogprobs, SchedulerOutput
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler

TINY_TOKENIZER = Path(__file__).parent.parent / "data" / "golden" / "tiny" / "tokenizer"
VOCAB_SIZE = 256


@dataclass
class FakeStep:
    """A step that samples when it is asked: by then the samples of earlier steps are known."""

    sample: Callable[[], ModelRunnerOutput]

    def result(self) -> ModelRunnerOutput:
        return self.sample()


@dataclass
class FakeRunner:
    """Samples `script(request)` for each row.

    Attributes:
      script: next token of a request, given everything it has so far.
      fail_at: step number (from 0) that raises instead.
    """

    script: Callable[[Request], int]
    fail_at: int | None = None
    steps: list[SchedulerOutput] = field(default_factory=list)
    closed: bool = False

    def execute(self, output: SchedulerOutput) -> FakeStep:
        if len(self.steps) == self.fail_at:
            raise RuntimeError("the device is on fire")
        self.steps.append(output)
        return FakeStep(lambda: self._sample(output))

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        tokens = [self.script(s.request) if s.samples else 0 for s in output.scheduled]
        rows = len(tokens)
        logprobs = RunnerLogprobs(
            sampled=np.full(rows, -0.5, np.float32),
            ranks=np.ones(rows, np.int32),
            top_ids=np.array([[t, ord("x"), ord("y")] for t in tokens], np.int32),
            top=np.tile(np.array([-0.5, -1.5, -2.5], np.float32), (rows, 1)),
        )
        return ModelRunnerOutput(np.array(tokens, np.int32), logprobs)

    def update_params(self, params: Any) -> None:
        """A model of this kind is nothing but its script."""
        if not callable(params):
            raise ValueError("params are no script")
        self.script = params

    def close(self) -> None:
        self.closed = True


def spell(text: str) -> Callable[[Request], int]:
    """Return a script that spells `text` in UTF-8 bytes, then ends every request."""
    data = text.encode()

    def script(request: Request) -> int:
        position = len(request.output_token_ids)
        return data[position] if position < len(data) else 2

    return script


def make_engine(
    script: Callable[[Request], int],
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 8,
    token_budget: int = 32,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    fail_at: int | None = None,
    async_scheduling: bool = False,
) -> Engine:
    """Return an engine on a `FakeRunner` and the tiny byte tokenizer (token id = byte)."""
    tokenizer = Tokenizer.from_directory(TINY_TOKENIZER)
    scheduler = Scheduler(
        pool=BlockPool(num_blocks, block_size, enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=max_model_len,
    )
    return Engine(
        scheduler=scheduler,
        runner=FakeRunner(script, fail_at),
        tokenizer=tokenizer,
        async_scheduling=async_scheduling,
        processor=InputProcessor(
            tokenizer, vocab_size=VOCAB_SIZE, max_model_len=max_model_len, seed=0
        ),
    )
