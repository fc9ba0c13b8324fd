"""Options of `paged simulate`; names and defaults are the engine's where it has them."""

import argparse
import pathlib
from collections.abc import Callable

from paged.scheduler.eviction.policies import DEFAULT_POLICY
from paged.server.cli_options import size

# Options that are arguments of the built-in traces; None leaves the trace's own default.
TRACE_OPTIONS = (
    "num_requests", "documents", "document_tokens", "passes", "output_tokens", "sessions", "turns",
    "seed",
)  # fmt: skip


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    _add_trace_options(parser)
    _add_cache_options(parser)
    _add_scheduling_options(parser)
    _add_device_options(parser)
    group = parser.add_argument_group("output", "Without any of these a table is printed.")
    group.add_argument("--json", action="store_true", help="print JSON: one object, or one in runs")
    group.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="write a line per run")
    group.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="draw hit rates, occupancy and latency (.png, .svg, .pdf); needs the extra `plot`",
    )
    group.add_argument(
        "--baselines",
        action="store_true",
        help="compare with contiguous reservations, and in a closed loop with static batches if as "
        "many of the longest requests fit",
    )
    group.add_argument(
        "--write-trace", type=pathlib.Path, metavar="FILE", help="only write the trace, as JSONL"
    )


def names(text: str) -> list[str]:
    """Parse names between commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name between its commas")
    return found


def sizes(text: str) -> list[int]:
    """Parse sizes between commas."""
    return [size(part) for part in text.split(",")]


def passes(text: str) -> list[str] | int:
    """Parse a number of passes or the direction of each."""
    return int(text) if text.isdecimal() else names(text)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trace", "What is left out is the trace's own default.")
    group.add_argument(
        "--trace",
        default="cyclic",
        metavar="NAME|FILE",
        help="cyclic, sawtooth, zipf, scan, working-set, chat, agent-tree, poisson, bursty, or a "
        "JSONL file",
    )
    group.add_argument(
        "--trace-format",
        choices=("auto", "paged", "mooncake"),
        default="auto",
        help="of a file; auto looks at its first line",
    )
    options: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
        ("--num-requests", size, "N", "requests (zipf, scan, working-set, poisson, bursty)"),
        ("--documents", size, "N", "documents (cyclic, sawtooth, zipf)"),
        ("--document-tokens", size, "TOKENS", "length of each document"),
        ("--passes", passes, "N|LIST", "passes (sawtooth), or forward,reverse,... (cyclic)"),
        ("--output-tokens", size, "TOKENS", "output of each document's request"),
        ("--sessions", size, "N", "conversations (chat)"),
        ("--turns", size, "N", "messages per conversation (chat)"),
        ("--seed", int, "N", "of all draws"),
    )
    for name, parse, metavar, text in options:
        group.add_argument(name, type=parse, metavar=metavar, help=text)
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="N",
        help="mean arrivals per second, instead of the trace's own arrival times; may be inf",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="X",
        help="shape of the gaps between arrivals: 1 is Poisson, below 1 bursty",
    )


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--num-blocks",
        type=sizes,
        metavar="N,N,...",
        help="KV blocks, the null block included; several are compared (default: what --gpu holds)",
    )
    group.add_argument(
        "--block-size", type=size, default=16, metavar="TOKENS", help="tokens per KV block"
    )
    group.add_argument(
        "--policy",
        type=names,
        default=[DEFAULT_POLICY],
        metavar="NAME,...",
        help="eviction policies, such as lookahead:8 or optimal; all compares all "
        f"(default: {DEFAULT_POLICY})",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prompts that begin alike",
    )


def _add_scheduling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--concurrency",
        type=size,
        metavar="N",
        help="keep N requests in service, whatever the arrival times (default: 1 for traces "
        "without arrival times, else none)",
    )
    group.add_argument(
        "--num-queued",
        type=size,
        metavar="N",
        help="further requests kept waiting in a closed loop (default: what the policy looks at)",
    )
    group.add_argument(
        "--max-num-seqs", type=size, default=256, metavar="N", help="most requests running"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=size,
        default=2048,
        metavar="TOKENS",
        help="most tokens of one step",
    )
    group.add_argument(
        "--max-model-len",
        type=size,
        metavar="TOKENS",
        help="longest prompt plus output (default: what the blocks hold)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="fcfs",
        help="serve by arrival, or by the priorities of the trace",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=size,
        default=0,
        metavar="TOKENS",
        help="most tokens of one prompt per step while others wait; 0: no limit",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let prompts enter in parts",
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "device", "Without --gpu every step counts as one second: times are numbers of steps."
    )
    group.add_argument("--gpu", metavar="NAME", help="such as a100, h100, h200, b200, l4, rtx-4090")
    group.add_argument(
        "--model", metavar="NAME|PATH", help="such as llama-3.1-8b, or a folder with a config.json"
    )
    group.add_argument("--tensor-parallel-size", type=size, default=1, metavar="N", help="GPUs")
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="SHARE",
        help="share of the GPU's memory to use",
    )  # fmt: skip
    for name, text in (("--weight-dtype", "of the weights"), ("--kv-cache-dtype", "of the cache")):
        group.add_argument(
            name, choices=("bfloat16", "fp8"), default="bfloat16", help=f"element type {text}"
        )
