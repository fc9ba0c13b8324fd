"""Options of `paged plan`; names are those of `paged serve` and `paged bench`."""

import argparse

from paged.scheduler.config import KV_CACHE_DTYPES, QUANTIZATIONS
from paged.server.cli_bench_options import count
from paged.server.cli_options import size
from paged.server.cli_simulate_options import names


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2-135m",
        metavar="MODEL",
        help="directory, config.json, GGUF file or Hub id (only its config.json is fetched), or a "
        "well-known name such as llama-3.1-8b, qwen2.5-7b",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: bytes and seconds, unrounded (default: tables)",
    )
    _add_gpu_options(parser)
    _add_workload_options(parser)
    _add_engine_options(parser)
    group = parser.add_argument_group(
        "assumptions", "Shares of the figures above that a step reaches; measure yours, put it in."
    )
    group.add_argument(
        "--compute-efficiency", type=float, default=0.6, metavar="SHARE", help="of --tflops"
    )
    group.add_argument(
        "--memory-efficiency", type=float, default=0.8, metavar="SHARE", help="of --bandwidth"
    )
    group.add_argument(
        "--step-overhead", type=float, default=0.5, metavar="MS", help="host time of each step"
    )
    group = parser.add_argument_group("Hugging Face Hub")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub")
    group.add_argument(
        "--hf-token", metavar="TOKEN", help="access token (default: the one that is logged in)"
    )


def _add_gpu_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "device", "Without any of these all GPUs of the table are compared, a line each."
    )
    group.add_argument(
        "--gpu",
        type=names,
        metavar="NAME,...",
        help="a100, a100-40gb, h100, h100-pcie, h200, h20, b200, a10, l4, l40s, rtx-4090, "
        "rtx-5090 or mi300x; several are compared",
    )
    for name, metavar, text in (
        ("--gpu-memory", "GIB", "memory, of a GPU that is not in the table"),
        ("--bandwidth", "GB/S", "its memory bandwidth"),
        ("--tflops", "TFLOPS", "its dense 16-bit arithmetic, without sparsity"),
        ("--link-bandwidth", "GB/S", "to the other GPUs, one direction"),
    ):
        group.add_argument(name, type=float, metavar=metavar, help=text)


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload", "What a typical request looks like.")
    group.add_argument(
        "--input-len", type=count, default=1024, metavar="TOKENS", help="tokens of the prompt"
    )
    group.add_argument(
        "--output-len", type=count, default=256, metavar="TOKENS", help="tokens of the answer"
    )
    group.add_argument(
        "--shared-prefix-len",
        type=size,
        default=0,
        metavar="TOKENS",
        help="tokens at the start of every prompt that all share, such as a system prompt",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "engine", "As for `paged serve`; what is left out is tried, or the engine's default."
    )
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=count, metavar="N", help="GPUs that share the model"
    )
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="what the weights are kept in")
    group.add_argument(
        "--kv-cache-dtype",
        choices=[name for name in KV_CACHE_DTYPES if name != "float32"],
        default="auto",
        help="type of the KV cache; auto: the model's, with fp8 shown beside it",
    )
    group.add_argument("--block-size", type=count, metavar="TOKENS", help="tokens per KV block")
    group.add_argument("--max-num-seqs", type=count, metavar="N", help="most requests running")
    group.add_argument(
        "--max-num-batched-tokens", type=count, metavar="TOKENS", help="most tokens of one step"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.92,
        metavar="SHARE",
        help="share of each GPU's memory to use",
    )
