"""Options of `paged bench`; names, and most defaults, are those of `vllm bench`."""

import argparse
import math
import pathlib

from paged.server.cli_bench_dataset_options import add_dataset_options
from paged.server.cli_bench_values import (
    count,
    json_object,
    metadata,
    objective,
    rate,
    ratio,
    seconds,
    variation,
)
from paged.server.cli_engine_options import add_engine_options
from paged.server.cli_options import DEFAULT_PORT, HelpFormatter, size

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_BASE_URL = f"http://127.0.0.1:{DEFAULT_PORT}"


def add_bench_commands(parser: argparse.ArgumentParser) -> None:
    """Add `throughput`, `latency`, `serve`, `sweep` and `compare`."""
    benchmarks = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    throughput = _add(
        benchmarks,
        "throughput",
        "measure many requests at once, in this process",
        "Tokens per second when all prompts are there at the start.",
    )
    add_dataset_options(throughput, input_len=128, output_len=128, in_process=True)
    group = throughput.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=count, default=16, metavar="N", help="requests")
    group.add_argument(
        "--num-warmups", type=size, default=1, metavar="N", help="runs before the one that counts"
    )
    _add_goodput(group)
    _add_output(throughput)
    add_engine_options(throughput, log_level="warning", prefix_cache_policy="lookahead")

    latency = _add(
        benchmarks,
        "latency",
        "measure one batch at a time, in this process",
        "Latency of a batch that has the engine for itself, one batch after the other.",
    )
    _add_lengths(latency)
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
    add_serve_options(serve)
    group = _add_output(serve)
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="write what every request did into --json, too",
    )

    sweep = _add(
        benchmarks,
        "sweep",
        "measure a server at one load, or with one setting, after the other",
        "`serve` once for every value of --vary, and with --serve-args for every setting of a "
        "server of paged; finds the knee.",
    )
    add_serve_options(sweep)
    _add_sweep_options(sweep)
    _add_output(sweep)

    compare = _add(
        benchmarks,
        "compare",
        "put two results side by side",
        "Ratios of two results of `serve`, `throughput` or `latency`, or of `vllm bench`.",
    )
    _add_compare_options(compare)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add what a load on a server is made of; `sweep` varies these."""
    _add_server_options(parser)
    _add_load_options(parser)
    add_dataset_options(parser, input_len=1024, output_len=128, in_process=False)
    _add_request_options(parser)


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
    if name in ("throughput", "latency"):
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="directory, GGUF file or Hub id (default: SmolLM2-135M-Instruct)",
        )
    return parser


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "prompts",
        "Random tokens, drawn with --seed. --max-model-len is the longest request unless you set "
        "it.",
    )
    group.add_argument(
        "--input-len",
        dest="random_input_len",
        type=count,
        default=32,
        metavar="TOKENS",
        help="tokens of a prompt",
    )
    group.add_argument(
        "--output-len",
        dest="random_output_len",
        type=count,
        default=128,
        metavar="TOKENS",
        help="tokens generated",
    )
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="SHARE",
        help="draw both lengths from this share below to this share above them",
    )


def _add_goodput(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--goodput",
        type=objective,
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help="count the requests that keep these bounds, too: ttft, tpot and e2el, in milliseconds "
        "(default: none)",
    )


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--vary",
        type=variation,
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="option of `serve` and its values, such as request-rate=1,2,4; several are combined "
        "(default: none)",
    )
    group.add_argument(
        "--serve-args",
        metavar="ARGS",
        help="start `paged serve ARGS` on a free port, instead of --base-url, and stop it at the "
        "end",
    )
    group.add_argument(
        "--vary-server",
        type=variation,
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="option of `paged serve` and its values; a server is started for each (default: none)",
    )
    group.add_argument(
        "--startup-timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="until such a server must be ready",
    )


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    for name, text in (("baseline", "what is compared with"), ("contender", "what is compared")):
        parser.add_argument(
            name,
            type=pathlib.Path,
            metavar=f"{'A' if name == 'baseline' else 'B'}.json",
            help=f"{text}: a result, or a folder of runs, whose medians count",
        )
    parser.add_argument(
        "--tolerance",
        type=seconds,
        default=3.0,
        metavar="PERCENT",
        help="differences up to this are no difference",
    )
    parser.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="exit status 3 if any figure is worse by more than that",
    )


def _add_output(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
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
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write a page with tables and plots there; it needs nothing else",
    )
    group.add_argument(
        "--metadata",
        type=metadata,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="further facts for the record (default: none)",
    )
    group.add_argument(
        "--disable-tqdm",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="show no progress bar",
    )
    return group


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default=DEFAULT_BASE_URL,
        metavar="URL",
        help="address without the endpoint; a /v1 at its end is understood",
    )
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="API to measure")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server names)")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME",
        help="adapters that the server has; every session asks one of them, and none the model",
    )
    group.add_argument(
        "--lora-assignment",
        choices=("random", "round-robin"),
        default="random",
        help="which session asks which adapter; random: drawn with --seed",
    )
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
    _add_goodput(group)


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "requests",
        "Completions are asked for with random token ids, chats with random words of about a token "
        "each.",
    )
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
