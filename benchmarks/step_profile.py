"""Where the time of one decode step and one prefill step goes, by kind of work.

    python -m benchmarks.step_profile --picture docs/images/step_profile.png

The running engine is traced with JAX's profiler, which knows when each operation of the compiled
step began and ended on a CPU. An operation belongs to the first row of `KINDS` that matches a
Python function it was traced from (a fusion: that of its last operation). At every moment of a step
its time is shared by the operations under way; a moment with none is the host's: scheduling,
dispatch, detokenising. So the kinds add up to the step.

Tracing costs something per operation: the step without it is timed too, and printed.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams
from paged.scheduler.runner import ModelRunner

HEAD, OTHER, HOST = "head and choice", "inputs, embedding, other", "host"
# Kind -> pattern of "FILE:FUNCTION" of any frame that an operation was traced from; the first wins.
KINDS = {
    HEAD: r"sampling\.py:|:sample_step|:greedy_step|:resize_step|:Embed\.(logits|best_tokens)",
    OTHER: r":Embed\.__call__",
    "RoPE and KV write": r"kv_write[a-z_]*\.py:|rope_write[a-z_]*\.py:|/rope\.py:",
    "attention": r"/[a-z_]*attention[a-z_]*\.py:",
    "linear layers": r":Linear\.|/[a-z_]*linear[a-z_]*\.py:",
    "norms and elementwise": r":RMSNorm\.|:MLP\.|:DecoderLayer\.",
}
COLOURS = {
    "linear layers": "#0072B2",
    "attention": "#E69F00",
    "RoPE and KV write": "#D55E00",
    "norms and elementwise": "#009E73",
    HEAD: "#56B4E9",
    OTHER: "#CC79A7",
    HOST: "#BBBBBB",
}
# Operations that only hold others.
_CONTAINERS = re.compile(r"(while|call|cond|conditional)(\.|$)")
_STEP = "paged step"
# As XLA calls the programs of a step, the model's first; the others are about the head.
_FORWARD, *_HEADS = "jit_forward_step", "jit_resize_step", "jit_greedy_step", "jit_sample_step"
_VOCABULARY = range(300, 30_000)


class Interval(NamedTuple):
    """An operation of a module that was under way from `start` to `end`, nanoseconds."""

    module: str
    op: str
    start: float
    end: float


def kinds_of_ops(hlo: str) -> dict[str, str]:
    """Return the kind of each named operation of a compiled module.

    Args:
      hlo: the module as text, with its tables of stack frames.
    """
    names = dict(re.findall(r'^(\d+) "(.*)"$', _table(hlo, "FileNames"), re.MULTILINE))
    functions = dict(re.findall(r'^(\d+) "(.*)"$', _table(hlo, "FunctionNames"), re.MULTILINE))
    location = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) "
    places = {
        number: f"{names[file]}:{functions[function]}"
        for number, file, function in re.findall(
            location, _table(hlo, "FileLocations"), re.MULTILINE
        )
    }
    frame = r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}"
    frames = {
        int(number): (places[place], int(parent))
        for number, place, parent in re.findall(frame, _table(hlo, "StackFrames"), re.MULTILINE)
    }
    # jaxlib 0.11 writes the parent's number plus one, so that 1 is none; nothing is its own parent.
    offset = int(any(number == parent for number, (_, parent) in frames.items()))

    def kind(number: int) -> str:
        chain = []
        while number in frames:
            place, parent = frames[number]
            chain.append(place)
            number = parent - offset
        found = (k for k, pattern in KINDS.items() if any(re.search(pattern, f) for f in chain))
        return next(found, OTHER)

    found, inside, computation = dict[str, str](), dict[str, str](), ""
    for line in hlo.splitlines():
        if opening := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            computation = opening[1]
        elif op := re.match(r"\s+(?:ROOT )?%(\S+) = ", line):
            frame_id = re.search(r"stack_frame_id=(\d+)", line)
            fusion = re.search(r" fusion\((.*?)\), .*calls=%([^\s,]+)", line)
            candidates = [kind(int(frame_id[1]))] if frame_id else []
            if fusion:
                # Some lost their frame, or have that of the call of a whole layer: then the last
                # operation inside that has a kind speaks for them, else the first such operand.
                candidates.append(inside.get(fusion[2], OTHER))
            if fusion and not frame_id:
                operands = re.findall(r"%([^\s,)]+)", fusion[1])
                candidates += [found.get(name, OTHER) for name in operands]
            if candidates:
                found[op[1]] = next((k for k in candidates if k != OTHER), OTHER)
                if found[op[1]] != OTHER:
                    inside[computation] = found[op[1]]
    return found


def _table(hlo: str, name: str) -> str:
    """Return the lines of one of the tables that precede the computations."""
    found = re.search(rf"^{name}\n(.*?)\n\n", hlo + "\n\n", re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def share_out(
    start: float, end: float, intervals: Iterable[Interval], kind: Callable[[Interval], str]
) -> dict[str, float]:
    """Return the time of each kind between two moments, which they add up to.

    Args:
      start, end: the moments.
      intervals: operations; they may overlap.
      kind: of an operation.
    """
    changes = []
    for interval in intervals:
        if interval.start < end and interval.end > start:
            changes.append((max(start, interval.start), True, interval))
            changes.append((min(end, interval.end), False, interval))
    changes.sort(key=lambda change: change[0])
    times: dict[str, float] = defaultdict(float)
    active: list[Interval] = []
    now = start
    for moment, begins, interval in changes:
        _add(times, active, moment - now, kind)
        now = moment
        if begins:
            active.append(interval)
        else:
            active.remove(interval)
    _add(times, [], end - now, kind)
    return dict(times)


def _add(
    times: dict[str, float],
    active: Sequence[Interval],
    duration: float,
    kind: Callable[[Interval], str],
) -> None:
    # A loop counts where nothing in it runs: that is its own overhead.
    working = [i for i in active if not _CONTAINERS.match(i.op)] or active
    for interval in working:
        times[kind(interval)] += duration / len(working)
    if not working:
        times[HOST] += duration


def read_trace(folder: Path) -> tuple[list[tuple[float, float]], list[Interval]]:
    """Return the steps of a trace, as (start, end) in nanoseconds, and its operations."""
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    begun: dict[Any, Interval] = {}
    ended: dict[Any, float] = {}
    steps = []
    for name, start, end, stats in _events(file):
        if name == _STEP:
            steps.append((start, end))
        elif "hlo_op" in stats:
            begun[stats["_p"]] = Interval(stats["hlo_module"], stats["hlo_op"], start, end)
        elif name.startswith("end: "):
            # Work that was handed to other threads ends here, not with the hand-over.
            ended[stats["_c"]] = end
    return sorted(steps), [
        i._replace(end=max(i.end, ended.get(key, i.end))) for key, i in begun.items()
    ]


def _events(file: Path) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield the name, the start, the end and the statistics of what matters in a trace."""
    with warnings.catch_warnings():
        # The iterators below are of types without a module, which Python 3.12 deprecates; where
        # warnings are errors, that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    name, start = event.name, event.start_ns
                    if not name.startswith("Thread"):  # most of all, and of no use
                        yield name, start, start + event.duration_ns, dict(event.stats)


def profile(engine: Engine, step: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Return milliseconds per step by kind, and under "untraced" the whole step without a trace.

    Args:
      engine: whose compiled steps run.
      step: does one step.
      num_steps: of each, traced and untraced.
    """
    untraced = []
    for _ in range(num_steps):
        started = time.perf_counter()
        step()
        untraced.append(time.perf_counter() - started)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(num_steps):
                with jax.profiler.TraceAnnotation(_STEP):
                    step()
        steps, intervals = read_trace(Path(folder))
    kinds = _kinds_by_module(engine, intervals)

    def kind(interval: Interval) -> str:
        default = HEAD if interval.module in _HEADS else OTHER
        return kinds.get(interval.module, {}).get(interval.op, default)

    totals: dict[str, float] = defaultdict(float)
    for start, end in steps:
        for name, duration in share_out(start, end, intervals, kind).items():
            totals[name] += duration / 1e6 / len(steps)
    return {**totals, "untraced": 1e3 * statistics.median(untraced)}


def _kinds_by_module(engine: Engine, intervals: Iterable[Interval]) -> dict[str, dict[str, str]]:
    """Return the kinds of the operations of the programs of the step that was traced.

    All buckets' programs have the same names; the one that ran is the one that has most of the
    operations seen.
    """
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    seen: dict[str, set[str]] = defaultdict(set)
    for interval in intervals:
        seen[interval.module].add(interval.op)
    found = {}
    programs = runner.programs
    by_module: list[Iterable[Any]] = [
        table.values()
        for table in (programs.forward, programs.resize, programs.greedy, programs.sample)
    ]
    for module, compiled in zip((_FORWARD, *_HEADS), by_module, strict=True):
        if not seen[module]:
            continue
        candidates = [kinds_of_ops(program.as_text()) for program in compiled]
        found[module] = max(candidates, key=lambda kinds: len(seen[module] & kinds.keys()))
    return found


def decode_steps(engine: Engine, num_seqs: int, context: int, num_steps: int) -> dict[str, float]:
    """Profile steps that decode for equally long sequences."""
    draw = random.Random(0)
    # Two steps more than are measured, and chunks of prompts that come in while others decode.
    output_len = 2 * num_steps + 2 + context * num_seqs // 256
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for number in range(num_seqs):
        prompt = draw.choices(_VOCABULARY, k=context)
        engine.add_request(f"decode-{number}", prompt, params)
    started: set[str] = set()
    while len(started) < num_seqs:
        started |= {output.request_id for output in engine.step()[0]}
    engine.step()
    result = profile(engine, lambda: _step(engine), num_steps)
    engine.abort([f"decode-{number}" for number in range(num_seqs)])
    return result


def prefill_steps(engine: Engine, length: int, num_steps: int) -> dict[str, float]:
    """Profile steps that compute one prompt each."""
    draw = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    numbers = iter(range(2 * num_steps + 1))

    def step() -> None:
        prompt = draw.choices(_VOCABULARY, k=length)
        engine.add_request(f"prefill-{next(numbers)}", prompt, params)
        _step(engine)

    step()
    return profile(engine, step, num_steps)


def _step(engine: Engine) -> None:
    if not engine.step()[0]:
        raise RuntimeError("A step gave no token; lower --prompt to what one step computes.")


def markdown_table(steps: Mapping[str, Mapping[str, float]]) -> str:
    """Return milliseconds and shares by kind, one column per profiled step."""
    lines = ["| milliseconds | " + " | ".join(steps) + " |", "|---" * (len(steps) + 1) + "|"]
    wholes = {title: sum(times.get(k, 0.0) for k in COLOURS) for title, times in steps.items()}
    for kind in COLOURS:
        cells = [
            f"{times.get(kind, 0.0):.2f} ({times.get(kind, 0.0) / wholes[title]:.0%})"
            for title, times in steps.items()
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    lines.append("| whole, traced | " + " | ".join(f"{w:.2f}" for w in wholes.values()) + " |")
    untraced = (f"{times['untraced']:.2f}" for times in steps.values())
    lines.append("| whole, not traced | " + " | ".join(untraced) + " |")
    return "\n".join(lines)


def draw_picture(path: Path, steps: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar per profiled step, its kinds in proportion and labelled with milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.9 * len(steps)), layout="constrained")
    axes = figure.subplots()
    for row, times in enumerate(steps.values()):
        whole = sum(times.get(kind, 0.0) for kind in COLOURS)
        left = 0.0
        for kind, colour in COLOURS.items():
            share = 100 * times.get(kind, 0.0) / whole
            label = kind if row == 0 else None
            axes.barh(row, share, left=left, color=colour, edgecolor="white", label=label)
            if share > 4:
                text = f"{times[kind]:.{0 if times[kind] >= 100 else 1}f}"
                axes.text(left + share / 2, row, text, ha="center", va="center", fontsize=9)
            left += share
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the step, percent; labels in milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or Hub id (default: the demo model)")
    parser.add_argument("--num-seqs", type=int, default=16, help="that decode")
    parser.add_argument("--context", type=int, default=256, help="tokens of each")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--num-steps", type=int, default=10, help="traced, and untraced")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--picture", type=Path, help="draw it into this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    config = EngineConfig(
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.num_seqs,
        max_num_batched_tokens=max(args.prompt, args.num_seqs),
        async_scheduling=False,
    )
    engine = load_engine(args.model, config).engine
    decode = f"decode, {args.num_seqs} x {args.context}"
    steps = {
        decode: decode_steps(engine, args.num_seqs, args.context, args.num_steps),
        f"prefill, {args.prompt}": prefill_steps(engine, args.prompt, args.num_steps),
    }
    engine.close()
    print(markdown_table(steps))
    if args.json:
        args.json.write_text(json.dumps(steps, indent=1) + "\n")
    if args.picture:
        draw_picture(args.picture, steps)


if __name__ == "__main__":
    main()
