"""Options of the command line; names and meanings are vLLM's where vLLM has them."""

import argparse
import re
from collections.abc import Sequence

import msgspec

from paged.scheduler.params import POOLINGS
from paged.server.output_formats import AUTO, NONE
from paged.server.reasoning import REASONING_FORMATS
from paged.server.settings import PoolerConfig
from paged.server.tool_parsers.formats import TOOL_FORMATS

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_PORT = 8000

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}


def dashed(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--like_this` spelt `--like-this`; values stay as they are."""
    result = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if re.fullmatch(r"--[a-z][a-z_-]*", name):
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def size(text: str) -> int:
    """Parse a count with an optional suffix: 16k is 16,000 and 16K is 16,384 (m, M, g, G too)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write 4096, 16k or 16K, for example"
        )
    value = float(match[1]) * _SUFFIXES[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 0 to 65535")
    return int(text)


class _PoolerFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of vLLM's pooler config that mean something here."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    normalize: bool = True


def pooler_config(text: str) -> PoolerConfig:
    """Parse the JSON object that says how embeddings are made."""
    try:
        fields = msgspec.json.decode(text, type=_PoolerFields)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if fields.pooling_type and fields.seq_pooling_type:
        raise argparse.ArgumentTypeError(
            "pooling_type and seq_pooling_type mean the same; give one of them"
        )
    name = fields.pooling_type or fields.seq_pooling_type
    pooling = next((each for each in POOLINGS if name and each == name.lower()), None)
    if name and pooling is None:
        known = ", ".join(each.upper() for each in POOLINGS)
        raise argparse.ArgumentTypeError(f"pooling_type {name!r} is unknown; choose {known}")
    return PoolerConfig(pooling=pooling, normalize=fields.normalize)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add what concerns HTTP."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="0.0.0.0", help="address to listen on")
    group.add_argument(
        "--port", type=port, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="ask clients for one of these keys (default: $PAGED_API_KEY or $VLLM_API_KEY, else "
        "none); /health, /ping and /metrics stay open",
    )
    group.add_argument(
        "--cache-salt-per-key",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with several API keys, keep their prefix caches apart, so that no tenant can tell "
        "from the time what another one has sent",
    )
    group.add_argument(
        "--metrics-require-key",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="ask for the key at /metrics, too",
    )
    group.add_argument(
        "--ui",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a playground for browsers at /, with a live view of the engine",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names of the model in requests, the first also in answers (default: MODEL)",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE|TEXT",
        help="Jinja template, as a file or literally (default: the model's own)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let requests bring their own template",
    )
    _add_format_options(group)
    group.add_argument(
        "--max-stored-responses",
        type=size,
        default=1000,
        metavar="N",
        help="answers of /v1/responses kept in memory for previous_response_id; 0 keeps none",
    )
    group.add_argument(
        "--client-max-size",
        type=size,
        default="16M",
        metavar="BYTES",
        help="largest request body; larger ones are refused with 413",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests get to finish after SIGTERM",
    )
    group.add_argument(
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="do not log throughput and load every 10 seconds",
    )
    group.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log id and parameters of each request; its prompt at --log-level debug only",
    )


def _add_format_options(group: "argparse._ArgumentGroup") -> None:
    """Add how a model's text is taken apart."""
    group.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let the model decide about tool calls (default: where their format is known)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=[AUTO, NONE, *TOOL_FORMATS],
        default=AUTO,
        metavar="NAME",
        help="format of the model's tool calls; auto looks for it in the chat template; known are "
        + ", ".join(TOOL_FORMATS),
    )
    group.add_argument(
        "--reasoning-parser",
        choices=[AUTO, NONE, *REASONING_FORMATS],
        metavar="NAME",
        help="format of the model's reasoning, which then is apart from the answer; auto looks for "
        f"it in the chat template; known are {', '.join(REASONING_FORMATS)} (default: none)",
    )
    _add_pooler_option(group)
    group.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help='keep tools out of the prompt with tool_choice "none"',
    )


def _add_pooler_option(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--pooler-config",
        type=pooler_config,
        default="{}",
        metavar="JSON",
        help='how embeddings are made: "pooling_type" LAST or MEAN (default: what the model asks '
        'for), "normalize" (default: true)',
    )


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Add what concerns a running server."""
    group = parser.add_argument_group(
        "running server",
        "Use a server instead of loading a model here; the options below `sampling` are the "
        "server's own then, and do nothing.",
    )
    group.add_argument("--url", help=f"its address, such as http://localhost:{DEFAULT_PORT}/v1")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="its key (default: $PAGED_API_KEY or $VLLM_API_KEY, if set)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add how tokens are chosen."""
    group = parser.add_argument_group("sampling", "What is left out is the model's own default.")
    group.add_argument(
        "--max-tokens",
        type=size,
        default=max_tokens,
        metavar="N",
        help="most tokens to generate" + ("" if max_tokens else " (default: as many as fit)"),
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token; up to 2 (default: the model's)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="SHARE",
        help="sample from this share of the probability (default: the model's)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="sample from this many of the likeliest tokens (default: the model's)",
    )
    group.add_argument(
        "--sampling-seed",
        type=int,
        metavar="N",
        help="make the draw repeatable (default: drawn from --seed)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the text before this; repeat for several (default: none)",
    )


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the files and how many requests run at once."""
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", metavar="FILE", required=True, help="JSONL file of requests"
    )
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="JSONL file of answers; requests that it answers already are skipped",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive,
        default=256,
        metavar="N",
        help="requests in the engine at once, running or waiting",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="what the requests call the model (default: MODEL)",
    )
    _add_pooler_option(group)
