"""Options of `paged serve` about the network: sockets, TLS, browsers, and what clients may ask."""

import argparse
import json

from paged.scheduler.params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from paged.server.cli_options import size


def string_list(text: str) -> list[str]:
    """Parse a JSON list of strings, or one string."""
    if not text.lstrip().startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON list of strings such as ["*"]')
    return values


def json_object(text: str) -> dict[str, object]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def seconds(text: str) -> float:
    """Parse a time of 0 or more seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add sockets, TLS and browsers."""
    group = parser.add_argument_group("network")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket, not on a port")
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="prefix that a proxy leaves in front of every path, such as /llm",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate, PEM; serves HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key, PEM")
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="roots that clients' certificates are checked with"
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="certificates of clients: 0 not needed, 1 checked if sent, 2 required",
    )
    group.add_argument("--ssl-ciphers", metavar="LIST", help="OpenSSL's list, for TLS 1.2")
    for name, default, what in (
        ("origins", [], "origins whose pages may call the server"),
        ("methods", ["*"], "methods that they may use"),
        ("headers", ["*"], "headers that they may send"),
    ):
        group.add_argument(
            f"--allowed-{name}",
            type=string_list,
            default=default,
            metavar="JSON",
            help=f'{what}, a JSON list such as ["*"]',
        )
    group.add_argument(
        "--allow-credentials",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let those pages send cookies and the like",
    )
    group.add_argument(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="answer with the request's X-Request-Id, or a new one",
    )
    group.add_argument(
        "--sse-keep-alive-interval",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="send a comment in a stream that was silent for so long; 0: never",
    )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add what bounds clients."""
    group = parser.add_argument_group("limits", "Requests beyond them are refused.")
    for name, default, what in (
        ("--max-prompts", 1024, "most prompts of one completion request"),
        ("--max-n", MAX_N, "most samples per prompt"),
        ("--max-logprobs", MAX_LOGPROBS, "most alternatives per token"),
        ("--max-stop-strings", 4, f"most stop strings, at most {MAX_STOP_STRINGS}"),
        ("--max-concurrent-streams", 8192, "most streams open at once; further ones get 429"),
    ):
        group.add_argument(name, type=size, default=default, metavar="N", help=what)
    group.add_argument(
        "--max-requests-per-minute",
        type=size,
        metavar="N",
        help="most requests of each API key per minute; further ones get 429 (default: no limit)",
    )
    group.add_argument(
        "--body-timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="longest time that a request's body may take to arrive",
    )
    group.add_argument(
        "--write-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="a client that reads nothing of its stream for so long loses its connection",
    )


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add how answers look, and what requests leave out."""
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--response-role", default="assistant", metavar="NAME", help="role of chat answers"
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=("auto", "openai", "string"),
        default="auto",
        help="what templates get of a message with parts: a list of them, or their text",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of chat templates that requests do not set, such as "
        '{"enable_thinking": false}',
    )
    group.add_argument(
        "--stream-interval",
        type=size,
        default=1,
        metavar="N",
        help="tokens per chunk of a stream, after the first; a request can ask for more",
    )
    for name, what in (
        ("--enable-force-include-usage", "report the usage in every stream, chunk by chunk"),
        ("--return-tokens-as-token-ids", "spell tokens of log probabilities token_id:123"),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=what)
    for name, what in (
        ("--enable-prompt-tokens-details", "cached tokens are always reported"),
        ("--enable-server-load-tracking", "/load always counts"),
        ("--disable-uvicorn-access-log", "requests are logged at --log-level debug only"),
    ):
        group.add_argument(name, action="store_true", help=f"as it is anyway: {what}")
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="sampling defaults on top of the model's generation_config.json, such as "
        '{"temperature": 0.5}; max_new_tokens also caps what requests ask for',
    )
