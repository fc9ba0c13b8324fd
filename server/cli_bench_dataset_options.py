"""Options of `paged bench` that say what is asked for; names and defaults are vLLM's."""

import argparse
import pathlib

from paged.server.cli_bench_values import count, ratio, seconds
from paged.server.cli_options import size

DATASETS = ("random", "sharegpt", "prefix_repetition", "cyclic", "multi_turn", "custom")


def add_dataset_options(
    parser: argparse.ArgumentParser, *, input_len: int, output_len: int, in_process: bool
) -> None:
    """Add `--dataset-name` and what each dataset can be told.

    Args:
      parser: of a benchmark.
      input_len, output_len: defaults of random prompts.
      in_process: whether the requests go to an engine here, all at the start.
    """
    datasets = [name for name in DATASETS if not (in_process and name == "multi_turn")]
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name",
        choices=datasets,
        default="random",
        help="random: nothing in common; sharegpt: lengths like ShareGPT's; prefix_repetition: "
        "prefixes that several share; cyclic: documents in turn"
        + ("; multi_turn: chats that go on" if not in_process else "")
        + "; custom: a file",
    )
    group.add_argument(
        "--dataset-path",
        type=pathlib.Path,
        metavar="FILE",
        help='JSON Lines: {"prompt": "...", "output_tokens": 10} or {"messages": [...]} '
        "(custom only)",
    )
    if not in_process:  # there the engine has it
        group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and gaps")
    group.add_argument(
        "--disable-shuffle",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep the order (custom, prefix_repetition)",
    )
    _add_random(group, input_len, output_len, in_process=in_process)
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="TOKENS",
        help="most generated for lines that do not say; -1: all have to",
    )
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="refuse a file with fewer prompts than requests instead of repeating them",
    )
    group.add_argument(
        "--sharegpt-output-len",
        type=count,
        metavar="TOKENS",
        help="generate so many (default: drawn, too)",
    )
    for name, default, text in (
        ("prefix-repetition-prefix-len", 256, "tokens of a prefix"),
        ("prefix-repetition-suffix-len", 256, "tokens after it"),
        ("prefix-repetition-num-prefixes", 10, "different prefixes"),
        ("prefix-repetition-output-len", 128, "most generated"),
        ("cyclic-num-documents", 10, "different documents"),
        ("cyclic-document-len", 1024, "tokens of a document"),
        ("cyclic-question-len", 32, "tokens after it, never the same"),
        ("cyclic-output-len", 32, "most generated"),
    ):
        group.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    if not in_process:
        _add_multi_turn(group)


def _add_random(
    group: "argparse._ArgumentGroup", input_len: int, output_len: int, *, in_process: bool
) -> None:
    for name, default, text in (
        ("input-len", input_len, "tokens of a prompt"),
        ("output-len", output_len, "most generated"),
    ):
        names = [f"--random-{name}", f"--{name}"]
        group.add_argument(
            *(reversed(names) if in_process else names),
            dest=f"random_{name.replace('-', '_')}",
            type=count,
            default=default,
            metavar="TOKENS",
            help=f"{text} (random)",
        )
    group.add_argument(
        "--random-prefix-len",
        type=size,
        default=0,
        metavar="TOKENS",
        help="tokens before them that all prompts share",
    )
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="SHARE",
        help="draw both lengths from this share below to this share above them",
    )


def _add_multi_turn(group: "argparse._ArgumentGroup") -> None:
    for name, default, text in (
        ("num-turns", 5, "requests of a chat, each with all answers before it"),
        ("user-len", 64, "tokens that the user adds"),
        ("output-len", 128, "most generated"),
    ):
        group.add_argument(
            f"--multi-turn-{name}", type=count, default=default, metavar="N", help=text
        )
    group.add_argument(
        "--multi-turn-system-len",
        type=size,
        default=256,
        metavar="N",
        help="tokens at the start that all chats share",
    )
    group.add_argument(
        "--multi-turn-think-time",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="mean pause before the next turn, exponentially distributed",
    )


def dataset_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the options that the chosen dataset looks at, for the record."""
    used = {
        "custom": ("dataset_path", "custom_output_len", "no_oversample", "disable_shuffle"),
        "prefix_repetition": ("disable_shuffle",),
    }.get(args.dataset_name, ())
    found = {
        name: str(value) if isinstance(value, pathlib.Path) else value
        for name, value in vars(args).items()
        if name.startswith(f"{args.dataset_name}_") or name in used
    }
    return {"dataset_name": args.dataset_name, "seed": args.seed, **found}
