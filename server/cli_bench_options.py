"""Options of `paged bench`; names, and most defaults, are those of `vllm bench`."""

import argparse
import json
import math
import pathlib
from typing import Any

from paged.server.cli_engine_options import add_engine_options
from paged.server.cli_options import DEFAULT_PORT, HelpFormatter, size

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def count(text: str) -> int:
    """Parse a size of at least 1."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; give 1 or more")
    return value


def ratio(text: str) -> float:
    """Parse a share of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and below 1")
    return value


def rate(text: str) -> float:
    """Parse a number above 0, which may be inf."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0; inf is allowed")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; write {{"top_k": 5}}')
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def add_bench_commands(parser: argparse.ArgumentParser) -> None:
    """Add `throughput`, `latency` and `serve`."""
    benchmarks = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    throughput = _add(
        benchmarks,
        "throughput",
        "measure many requests at once, in this process",
        "Tokens per second when all prompts are there at the start.",
    )
    _add_lengths(throughput, input_len=128, output_len=128)
    group = throughput.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=count, default=16, metavar="N", help="requests")
    group.add_argument(
        "--num-warmups", type=size, default=1, metavar="N", help="runs before the one that counts"
    )
    _add_output(throughput)
    add_engine_options(throughput, log_level="warning", prefix_cache_policy="lookahead")

    latency = _add(
        benchmarks,
        "latency",
        "measure one batch at a time, in this process",
        "Latency of a batch that has the engine for itself, one batch after the other.",
    )
    _add_lengths(latency, input_len=32, output_len=128)
    group = latency.add_argument_group(
        "benchmark", "--max-num-seqs is --batch-size unless you set it."
    )
    group.add_argument("--batch-size", type=count, default=8, metavar="N", help="requests at once")
    group.add_argument(
        "--num-iters-warmup", type=size, default=10, metavar="N", help="batches that do not count"
    )
    group.add_argument("--num-iters", type=count, default=30, metavar="N", help="batches measured")
    _add_output(latency)
    add_engine_options(latency, log_level="warning", prefix_cache_policy="lookahead")

    serve = _add(
        benchmarks,
        "serve",
        "measure a running server, of paged or any other with OpenAI's API",
        "Throughput and latency of a server under load, as its clients see them.",
    )
    _add_server_options(serve)
    _add_load_options(serve)
    _add_request_options(serve)
    _add_output(serve)


def _add(
    benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = benchmarks.add_parser(
        name,
        help=text,
        description=f"{description} docs/benchmarking.md says how to read the figures.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    if name != "serve":
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="directory, GGUF file or Hub id (default: SmolLM2-135M-Instruct)",
        )
    return parser


def _add_lengths(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    group = parser.add_argument_group(
        "prompts",
        "Random tokens, drawn with --seed. --max-model-len is the longest request unless you set "
        "it.",
    )
    group.add_argument(
        "--input-len", type=count, default=input_len, metavar="TOKENS", help="tokens of a prompt"
    )
    group.add_argument(
        "--output-len", type=count, default=output_len, metavar="TOKENS", help="tokens generated"
    )
    _add_range_ratio(group)


def _add_range_ratio(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="SHARE",
        help="draw both lengths from this share below to this share above them",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        "--output-json",
        dest="json",
        type=pathlib.Path,
        metavar="FILE",
        help="write figures, settings and versions there",
    )
    group.add_argument(
        "--disable-tqdm",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="show no progress bar",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        metavar="URL",
        help="address without the endpoint; a /v1 at its end is understood",
    )
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="API to measure")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server names)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="its key (default: $PAGED_API_KEY or $VLLM_API_KEY, if set)",
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=count, default=1000, metavar="N", help="requests")
    group.add_argument(
        "--request-rate",
        type=rate,
        default=math.inf,
        metavar="RPS",
        help="mean requests per second, in a Poisson process; inf sends all at once",
    )
    group.add_argument(
        "--burstiness",
        type=rate,
        default=1.0,
        metavar="X",
        help="shape of the gaps: 1 is Poisson, below 1 bursty, inf evenly spaced",
    )
    group.add_argument(
        "--max-concurrency",
        type=count,
        metavar="N",
        help="most requests under way; later ones wait, unmeasured (default: no limit)",
    )
    group.add_argument(
        "--num-warmups", type=size, default=0, metavar="N", help="requests before those that count"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and gaps")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "requests",
        "Completions are asked for with random token ids, chats with random words of about a token "
        "each.",
    )
    group.add_argument(
        "--random-input-len", type=count, default=1024, metavar="TOKENS", help="tokens of a prompt"
    )
    group.add_argument(
        "--random-output-len", type=count, default=128, metavar="TOKENS", help="most generated"
    )
    group.add_argument(
        "--random-prefix-len",
        type=size,
        default=0,
        metavar="TOKENS",
        help="tokens before them that all prompts share",
    )
    _add_range_ratio(group)
    group.add_argument(
        "--vocab-size",
        type=count,
        default=30_000,
        metavar="N",
        help="token ids are drawn below this; no more than the model has",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="generate on past the end of a text (vLLM's field; not every server has it)",
    )
    group.add_argument("--temperature", type=float, help="(default: the server's)")
    group.add_argument("--top-p", type=float, help="(default: the server's)")
    group.add_argument("--top-k", type=int, help="(default: the server's)")
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request (default: none)",
    )
