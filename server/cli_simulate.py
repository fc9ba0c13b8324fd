"""`paged simulate`: a trace through scheduler and block pool without a model."""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from paged.scheduler.simulator.arrivals import with_arrivals
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.plots import plot_results
from paged.scheduler.simulator.pools import POLICIES
from paged.scheduler.simulator.reservation import STRATEGIES, simulate_reservation
from paged.scheduler.simulator.result import SimulationResult
from paged.scheduler.simulator.static_batching import simulate_static_batching
from paged.scheduler.simulator.step_cost import StepCost, UnitSteps
from paged.scheduler.simulator.sweep import sweep, write_csv
from paged.scheduler.simulator.trace import Trace
from paged.scheduler.simulator.trace_files import read_jsonl, read_mooncake, write_jsonl
from paged.scheduler.simulator.traces import TRACES, make_trace
from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_simulate_options import TRACE_OPTIONS
from paged.server.text_table import aligned

# Passes with a column of their own in the table.
_MAX_PASSES_SHOWN = 6


def run(args: argparse.Namespace) -> int:
    """Simulate, print and write what was asked for; return 0.

    Raises: UserError for options that do not go together, or a trace that cannot be read.
    """
    with user_errors():
        trace = _trace(args)
        if args.write_trace is not None:
            count = write_jsonl(trace, args.write_trace)
            print(f"{count} requests written to {args.write_trace}", file=sys.stderr)
            return 0
        cost, num_blocks = _device(args)
        config = _config(args, trace, num_blocks[0])
        results = sweep(
            trace,
            config,
            policies=_policies(args.policy),
            num_blocks=num_blocks,
            cost=cost,
            progress=sys.stderr.isatty(),
        )
        baselines = _baselines(trace, results[0], config, cost) if args.baselines else None
        _write_files(args, results)
    _print(results, baselines, as_json=args.json)
    return 0


def _trace(args: argparse.Namespace) -> Trace:
    options = {name: getattr(args, name) for name in TRACE_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    rates = {
        name: getattr(args, name)
        for name in ("request_rate", "burstiness")
        if getattr(args, name) is not None
    }
    if args.trace in ("poisson", "bursty"):
        return make_trace(args.trace, **options, **rates)
    if args.trace in TRACES:
        trace = make_trace(args.trace, **options)
    else:
        options.pop("seed", None)
        if options:
            raise UserError(f"--{_dashed(next(iter(options)))} does not apply to a trace file.")
        trace = _read(args.trace, args.trace_format)
    if "request_rate" in rates:
        return with_arrivals(trace, **rates, seed=args.seed or 0)
    if rates:
        raise UserError("--burstiness needs --request-rate.")
    return trace


def _read(path: str, trace_format: str) -> Trace:
    if not pathlib.Path(path).is_file():
        raise UserError(f"--trace {path} is no file, and none of {', '.join(TRACES)}.")
    if trace_format == "auto":
        with open(path, encoding="utf-8") as file:
            trace_format = "mooncake" if '"hash_ids"' in file.readline() else "paged"
    return read_mooncake(path) if trace_format == "mooncake" else read_jsonl(path)


def _device(args: argparse.Namespace) -> tuple[StepCost, list[int]]:
    """Return the cost of steps and the capacities to try."""
    if (args.gpu is None) != (args.model is None):
        raise UserError("--gpu and --model go together: the time of a step depends on both.")
    if args.gpu is None:
        if args.num_blocks is None:
            raise UserError("give --num-blocks, or --gpu and --model to derive it from memory.")
        return UnitSteps(), args.num_blocks
    # Byte sizes need JAX's types, which take a second to import.
    from paged.scheduler.simulator.gpus import find_gpu
    from paged.scheduler.simulator.model_presets import find_model
    from paged.scheduler.simulator.roofline import Roofline

    roofline = Roofline(
        find_gpu(args.gpu),
        find_model(args.model),
        tensor_parallel_size=args.tensor_parallel_size,
        weight_dtype=args.weight_dtype,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    if args.num_blocks is not None:
        return roofline, args.num_blocks
    num_blocks = roofline.num_blocks(
        args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
    )
    return roofline, [num_blocks]


def _config(args: argparse.Namespace, trace: Trace, num_blocks: int) -> SimulationConfig:
    concurrency = args.concurrency
    if concurrency is None and not trace.has_arrivals:
        concurrency = 1
    return SimulationConfig(
        num_blocks=num_blocks,
        block_size=args.block_size,
        concurrency=concurrency,
        num_queued=args.num_queued,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        scheduling_policy=args.scheduling_policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enable_prefix_caching=args.enable_prefix_caching,
    )


def _policies(asked: Sequence[str]) -> list[str]:
    """Return the policies asked for, each once, `all` spelt out."""
    found = [name for one in asked for name in (POLICIES if one == "all" else (one,))]
    return list(dict.fromkeys(found))


def _baselines(
    trace: Trace, result: SimulationResult, config: SimulationConfig, cost: StepCost
) -> dict[str, Any]:
    """Return how the same trace fares without blocks and without continuous batching."""
    num_slots = (config.num_blocks - 1) * config.block_size
    longest = max(request.prompt_tokens + request.output_tokens for request in trace)
    max_model_len = config.max_model_len or longest
    memory = [
        simulate_reservation(trace, strategy, num_slots=num_slots, max_model_len=max_model_len)
        for strategy in STRATEGIES
    ]
    found: dict[str, Any] = {
        "reservations": [
            dataclasses.asdict(use) | {"live_of_reserved": use.live_of_reserved} for use in memory
        ],
        "blocks": {
            "live": result.steps.mean_usage() * (1 - result.steps.mean_waste()),
            "live_of_reserved": 1 - result.steps.mean_waste(),
        },
    }
    # A static batch reserves the longest request for each of its rows.
    if config.concurrency and config.concurrency * max_model_len <= num_slots:
        static = simulate_static_batching(trace, config.concurrency, cost)
        continuous = result.per_second(result.totals.output_tokens)
        found["static_batching"] = {
            "output_tokens_per_second": static.output_tokens_per_second,
            "continuous_over_static": continuous / static.output_tokens_per_second,
        }
    return found


def _write_files(args: argparse.Namespace, results: Sequence[SimulationResult]) -> None:
    if args.csv is not None:
        write_csv(results, args.csv)
    if args.plot is not None:
        try:
            figure = plot_results(results)
        except ImportError as error:
            raise UserError(str(error)) from error
        figure.savefig(args.plot)


def _print(
    results: Sequence[SimulationResult], baselines: dict[str, Any] | None, *, as_json: bool
) -> None:
    if as_json:
        found = [result.to_dict() for result in results]
        shown: dict[str, Any] = found[0] if len(found) == 1 else {"runs": found}
        print(json.dumps(shown | ({} if baselines is None else {"baselines": baselines})))
        return
    print(aligned([_row(result) for result in results]))
    if baselines is not None:
        print("\nMemory, contiguous or in blocks (share of all; of what is reserved):")
        for use in (*baselines["reservations"], {"strategy": "blocks"} | baselines["blocks"]):
            live, reserved = use["live"], use["live_of_reserved"]
            print(f"  {use['strategy']:7} {live:6.1%} {reserved:6.1%} hold tokens")
        if "static_batching" in baselines:
            ratio = baselines["static_batching"]["continuous_over_static"]
            print(f"Continuous batching gives {ratio:.2f} times the throughput of static batches.")


def _row(result: SimulationResult) -> dict[str, str]:
    """Return the cells of a run by their headings."""
    totals = result.totals
    row = {
        "policy": result.policy,
        "blocks": f"{result.num_blocks}",
        "hit tokens": f"{result.hit_tokens}",
        "hit %": f"{100 * result.hit_rate:.1f}",
    }
    if 1 < len(result.passes) <= _MAX_PASSES_SHOWN:
        row |= {f"pass {i + 1}": f"{one.hit_tokens}" for i, one in enumerate(result.passes)}
    row |= {
        "KV use %": f"{100 * result.steps.mean_usage():.1f}",
        "waste %": f"{100 * result.steps.mean_waste():.1f}",
        "preempted": f"{totals.num_preemptions}",
        "recomputed": f"{totals.recomputed_tokens}",
    }
    if totals.num_rejected:
        row["rejected"] = f"{totals.num_rejected}"
    if result.device == "steps":
        return row | {"steps": f"{len(result.steps)}"}
    ttft, tpot, e2e = (result.latency(name) for name in ("ttft", "tpot", "e2e"))
    return row | {
        "TTFT p50 ms": _ms(ttft.p50),
        "p99": _ms(ttft.p99),
        "TPOT p50 ms": _ms(tpot.p50),
        "E2E p50 ms": _ms(e2e.p50),
        "tok/s": f"{result.per_second(totals.output_tokens):.0f}",
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if math.isfinite(seconds) else "-"


def _dashed(name: str) -> str:
    return name.replace("_", "-")
