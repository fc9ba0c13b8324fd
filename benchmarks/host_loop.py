"""Microseconds of the host per step and per token: the whole engine loop, without a device.

    python benchmarks/host_loop.py

A runner that returns at once stands for the device. Prefix caching is on, decoding greedy; the
requests cross block boundaries in different steps, as they do when they arrive at different times.
Each load is run with consumers that stream, and with consumers that want their output whole. The
mixed row is 63 decodes and a new prompt of 512 tokens in every step.

schedule     `Scheduler.schedule`: who computes what, blocks
build        `build_batch`: the packed array of the step
execute      what is left of `Runner.execute`: next to nothing here
update       `Scheduler.update`: tokens appended, stop checks, full blocks hashed
outputs      `OutputProcessor.process`: ids to text, stop strings, deltas
rest         of `Engine.step_deltas`: statistics
hand-over    what `AsyncEngine` adds: a thread, mailboxes, one waiting consumer per request

All times are processor times, which other work on the machine lengthens less than it does those of
a clock. Parts are medians over the steps of a run in which each function is wrapped by a stopwatch;
"step" is the median of a run without. The hand-over is a step through `AsyncEngine` less the same
step without it, medians again, both with a runner that sleeps for a while: without a pause the
event loop would fall behind and get several steps at once, which is cheaper.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

from paged.models.packing import BatchLayout
from paged.models.tokenizer import Tokenizer
from paged.scheduler import runner
from paged.scheduler.admission import InputProcessor
from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.buckets import BucketTable
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.output import ModelRunnerOutput, SchedulerOutput, StepStats
from paged.scheduler.output_processor import OutputProcessor
from paged.scheduler.params import MAX_PACKED_EDITS, SamplingParams
from paged.scheduler.row_table import RowTable
from paged.scheduler.scheduler import Scheduler
from paged.server.cli_serve import spare_collector

BLOCK_SIZE, VOCAB_SIZE = 16, 49152
MIXED_PROMPT_TOKENS = 512
PARTS = ("schedule", "build", "execute", "update", "outputs", "rest")


class NoDevice:
    """A runner that prepares each step as the real one does, and samples without a model.

    Attributes:
      step_seconds: time that a step pretends to take.
    """

    step_seconds = 0.0

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int) -> None:
        self._buckets = BucketTable(max_num_seqs, max_num_tokens)
        self._rows = RowTable(max_num_seqs, max_blocks_per_seq)
        self._max_blocks_per_seq = max_blocks_per_seq

    def execute(self, output: SchedulerOutput) -> "NoDevice.Step":
        bucket = self._buckets.pick(output.num_tokens, len(output.scheduled))
        layout = BatchLayout(
            bucket.num_tokens,
            bucket.num_seqs,
            self._max_blocks_per_seq,
            MAX_PACKED_EDITS,
            VOCAB_SIZE,
        )
        runner.build_batch(output, layout, self._rows, BLOCK_SIZE)
        return NoDevice.Step(len(output.scheduled), self.step_seconds)

    def close(self) -> None:
        pass

    class Step:
        def __init__(self, num_seqs: int, seconds: float) -> None:
            self._num_seqs = num_seqs
            self._seconds = seconds

        def result(self) -> ModelRunnerOutput:
            if self._seconds:
                time.sleep(self._seconds)
            return ModelRunnerOutput(np.full(self._num_seqs, 7, np.int32))


class Stopwatch:
    """Wraps functions of an object and adds up the seconds of their calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wrapped: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, function: str, name: str) -> None:
        original = getattr(owner, function)
        seconds = self.seconds

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[name] += time.thread_time() - started

        self._wrapped.append((owner, function, original))
        setattr(owner, function, timed)

    def unwrap(self) -> None:
        for owner, function, original in reversed(self._wrapped):
            setattr(owner, function, original)


def byte_tokenizer() -> Tokenizer:
    """A vocabulary of the 256 bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


class Load:
    """An engine and the requests that keep it busy.

    Args:
      num_seqs: requests of a step.
      num_steps: decode steps that will be measured.
      stream: whether tokens are wanted as they come.
      mixed: whether one of the requests is a new prompt in every step.
    """

    def __init__(self, num_seqs: int, num_steps: int, *, stream: bool, mixed: bool = False) -> None:
        self.num_decodes = num_seqs - mixed
        self.stream = stream
        self.mixed = mixed
        budget = self.num_decodes + MIXED_PROMPT_TOKENS if mixed else max(128, num_seqs) * 16
        # Prompt, the decodes while the last prompts enter, and the decodes that are measured.
        self.num_outputs = num_steps + 64
        blocks_per_seq = (128 + max(self.num_outputs, MIXED_PROMPT_TOKENS)) // BLOCK_SIZE + 2
        self.max_model_len = blocks_per_seq * BLOCK_SIZE
        tokenizer = byte_tokenizer()
        self.runner = NoDevice(num_seqs, budget, blocks_per_seq)
        self.engine = Engine(
            scheduler=Scheduler(
                pool=BlockPool((num_seqs + 1) * blocks_per_seq + 1, BLOCK_SIZE),
                max_num_seqs=num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=self.max_model_len,
            ),
            runner=self.runner,
            tokenizer=tokenizer,
            processor=InputProcessor(
                tokenizer, vocab_size=VOCAB_SIZE, max_model_len=self.max_model_len
            ),
        )
        self._rng = np.random.default_rng(0)

    def prompt(self, num_tokens: int) -> list[int]:
        return self._rng.integers(0, 256, num_tokens).tolist()

    def prompts(self) -> list[list[int]]:
        return [self.prompt(100 + index % BLOCK_SIZE) for index in range(self.num_decodes)]

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.num_outputs)

    def fill(self) -> None:
        """Add the requests and step until all of them decode."""
        for index, prompt in enumerate(self.prompts()):
            self.engine.add_request(f"r{index}", prompt, self.params(), stream=self.stream)
        while self.engine.scheduler.num_running < self.num_decodes:
            self.engine.step()
        self.engine.step()

    def step_seconds(self, step: int) -> float:
        """Run one step and return its seconds; a mixed one gets its new prompt before."""
        if self.mixed:
            one = SamplingParams(temperature=0, max_tokens=1)
            prompt = self.prompt(MIXED_PROMPT_TOKENS)
            self.engine.add_request(f"m{step}", prompt, one, stream=self.stream)
        started = time.thread_time()
        self.engine.step_deltas()
        return time.thread_time() - started


def parts_of_a_step(
    num_seqs: int, num_steps: int, *, stream: bool, mixed: bool
) -> dict[str, float]:
    """Return the median seconds of each part of a step, and of the whole as "step"."""
    plain = Load(num_seqs, num_steps, stream=stream, mixed=mixed)
    plain.fill()
    whole = statistics.median(plain.step_seconds(step) for step in range(num_steps))

    load = Load(num_seqs, num_steps, stream=stream, mixed=mixed)
    load.fill()
    watch = Stopwatch()
    watch.wrap(load.engine.scheduler, "schedule", "schedule")
    watch.wrap(load.engine.scheduler, "update", "update")
    watch.wrap(load.engine.runner, "execute", "build and execute")
    watch.wrap(runner, "build_batch", "build")
    watch.wrap(OutputProcessor, "process", "outputs")
    steps = []
    try:
        for step in range(num_steps):
            watch.seconds.clear()
            load.step_seconds(step)
            seconds = dict(watch.seconds)
            seconds["execute"] = seconds.pop("build and execute") - seconds["build"]
            steps.append(seconds)
    finally:
        watch.unwrap()
    parts = {name: statistics.median(s[name] for s in steps) for name in PARTS[:-1]}
    parts["rest"] = max(0.0, whole - sum(parts.values()))
    return {**parts, "step": whole}


def hand_over_seconds(num_seqs: int, num_steps: int, *, stream: bool) -> float:
    """Return processor seconds per step that `AsyncEngine` and its consumers add to the engine."""
    pause = 0.001 + 8e-6 * num_seqs

    def alone() -> float:
        load = Load(num_seqs, num_steps, stream=stream)
        load.runner.step_seconds = pause
        load.fill()
        moments = []
        for _ in range(num_steps):
            load.engine.step_deltas()
            moments.append(time.process_time())
        return median_gap(moments)

    async def served() -> float:
        load = Load(num_seqs, num_steps, stream=stream)
        load.runner.step_seconds = pause
        engine = AsyncEngine(
            LoadedEngine(
                load.engine, SimpleNamespace(name="none"), EngineConfig(), 0, {}
            )  # only the engine and its settings are read
        )
        moments: list[float] = []

        def on_step(stats: StepStats) -> None:
            if stats.num_running == num_seqs:
                moments.append(time.process_time())

        engine.add_stats_listener(on_step)
        engine.start()

        async def consume(prompt: list[int]) -> None:
            async for _ in engine.generate(prompt, load.params(), stream=stream):
                pass

        await asyncio.gather(*map(consume, load.prompts()))
        await engine.shutdown()
        return median_gap(moments)

    return max(0.0, asyncio.run(served()) - alone())


def median_gap(moments: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(moments))


def measure(num_seqs: int, num_steps: int, *, stream: bool, mixed: bool) -> dict[str, float]:
    """Return the microseconds of one load by column."""
    row = parts_of_a_step(num_seqs, num_steps, stream=stream, mixed=mixed)
    if not mixed:
        row["hand-over"] = hand_over_seconds(num_seqs, num_steps, stream=stream)
    row["loop"] = row["step"] + row.get("hand-over", 0.0)
    row["per token"] = row["loop"] / num_seqs
    return {name: 1e6 * seconds for name, seconds in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--json", help="write the figures to this file, in microseconds")
    args = parser.parse_args()
    spare_collector()
    rows = {}
    loads = [(n, stream, False) for n in args.num_seqs for stream in (False, True)]
    for num_seqs, stream, mixed in tqdm([*loads, (64, True, True)], desc="Loads"):
        name = f"{num_seqs - mixed}" + (f" + {MIXED_PROMPT_TOKENS} prompt tokens" if mixed else "")
        name += ", streaming" if stream else ", whole"
        rows[name] = measure(num_seqs, args.num_steps, stream=stream, mixed=mixed)
    columns = [*PARTS, "step", "hand-over", "loop", "per token"]
    print(f"{'requests':<35}" + "".join(f"{column:>10}" for column in columns))
    for name, row in rows.items():
        cells = (f"{row[c]:.1f}" if c in row else "-" for c in columns)
        print(f"{name:<35}" + "".join(f"{cell:>10}" for cell in cells))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
