"""Options of `paged doctor`."""

import argparse
import pathlib

from paged.server.cli_network_options import seconds


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add which server to examine, and how."""
    parser.add_argument("url", metavar="URL", help="of the server, such as http://localhost:8000")
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=10.0,
        help="time between the two readings; long enough for some requests to end",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=pathlib.Path,
        metavar=("A", "B"),
        help="instead, show the first token in which two prompts differ: text files, or JSON "
        "files with the bodies of requests",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="its key (default: $PAGED_API_KEY or $VLLM_API_KEY, if set)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
