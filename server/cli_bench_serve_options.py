"""Options of `paged bench serve`, most of them of `sweep`, too: the server, the load, requests."""

import argparse
import math
import pathlib

from paged.server.bench_names import METRICS, PERCENTILES, RAMP_UP_STRATEGIES
from paged.server.cli_bench_dataset_options import add_dataset_options
from paged.server.cli_bench_values import (
    count,
    header,
    json_object,
    metrics,
    objective,
    percentiles,
    rate,
    seconds,
)
from paged.server.cli_options import DEFAULT_PORT, port, size

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
BACKENDS = {"openai": ENDPOINTS[0], "vllm": ENDPOINTS[0], "openai-chat": ENDPOINTS[1]}
DEFAULT_BASE_URL = f"http://127.0.0.1:{DEFAULT_PORT}"


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add what a load on a server is made of; `sweep` varies these."""
    _add_server_options(parser)
    _add_load_options(parser)
    add_dataset_options(parser, input_len=1024, output_len=128, in_process=False)
    _add_request_options(parser)


def add_serve_output(group: "argparse._ArgumentGroup") -> None:
    """Add what only `serve` writes and prints."""
    group.add_argument(
        "--save-result",
        action="store_true",
        help="write what --json writes, into --result-dir under --result-filename",
    )
    group.add_argument(
        "--result-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="folder for --save-result; made if it is not there (default: the present one)",
    )
    group.add_argument(
        "--result-filename",
        metavar="NAME",
        help="its file (default: one made of rate, concurrency and time)",
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="write what every request did into the result, too",
    )
    group.add_argument(
        "--percentile-metrics",
        type=metrics,
        default=",".join(METRICS),
        metavar="NAMES",
        help="latencies that are printed, separated by commas; the result has all",
    )
    group.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=",".join(map(str, PERCENTILES)),
        metavar="P,P",
        help="percentiles that are printed; the result has them beside 50, 95 and 99",
    )


def add_goodput_option(group: "argparse._ArgumentGroup") -> None:
    """Add the bounds that good requests keep."""
    group.add_argument(
        "--goodput",
        type=objective,
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help="count the requests that keep these bounds, too, in milliseconds: ttft (to the first "
        "token), tpot (per further token), e2el (all of it) (default: none)",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default=DEFAULT_BASE_URL,
        metavar="URL",
        help="address without the endpoint; a /v1 at its end is understood",
    )
    group.add_argument(
        "--host", metavar="HOST", help="its host, instead of --base-url (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port",
        type=port,
        metavar="PORT",
        help=f"its port, instead of --base-url (default: {DEFAULT_PORT})",
    )
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="API to measure")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="the same by the names of vllm bench: openai-chat is /v1/chat/completions, the others "
        "are /v1/completions (default: as --endpoint says)",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="model to ask for (default: the first that the server names)",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME",
        help="adapters that the server has; every session asks one of them, and none the model "
        "(default: none)",
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
    group.add_argument(
        "--header",
        type=header,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="further HTTP headers of every request (default: none)",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="take any certificate of an https server, such as one that it has signed itself",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a server that does not answer yet",
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
        "--ramp-up-strategy",
        choices=RAMP_UP_STRATEGIES,
        help="let the rate rise from the first request to the last, by equal steps or by equal "
        "factors, instead of --request-rate (default: it does not rise)",
    )
    for name, text in (("start", "at the first request"), ("end", "at the last request")):
        group.add_argument(
            f"--ramp-up-{name}-rps",
            type=rate,
            metavar="RPS",
            help=f"requests per second {text}, with --ramp-up-strategy",
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
    add_goodput_option(group)


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
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token (default: the server's)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="SHARE",
        help="sample from this share of the probability (default: the server's)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="sample from this many of the likeliest tokens (default: the server's)",
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request (default: none)",
    )
    group.add_argument(
        "--request-id-prefix",
        metavar="TEXT",
        help="send it and the number of the request, from 0, as X-Request-Id (default: none is "
        "sent)",
    )
