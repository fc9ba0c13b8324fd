"""Options of the command line that concern LoRA adapters: room for them, and which are served."""

import argparse
import os.path
import re

import msgspec

from paged.scheduler.config import EngineConfig
from paged.scheduler.lora_config import LORA_DTYPES, LORA_RANKS
from paged.server.cli_options import positive
from paged.server.settings import LoRAModule

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of an adapter, with the reference's names."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_module(text: str) -> LoRAModule:
    """Parse an adapter: `name=path`, or a JSON object with name, path and base_model_name."""
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
        return _checked(text, module)
    name, _, path = text.partition("=")
    return _checked(text, _Module(name, path))


def lora_path(text: str) -> LoRAModule:
    """Parse the folder, or the id on the Hub, of an adapter, which is its name, too."""
    return _checked(text, _Module(text, text))


def _checked(text: str, module: _Module) -> LoRAModule:
    if not module.name or not module.path or _CONTROLS.search(module.name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no adapter; write NAME=PATH, or "
            '\'{"name": "NAME", "path": "PATH", "base_model_name": "MODEL"}\''
        )
    return LoRAModule(
        name=module.name,
        path=os.path.expanduser(module.path),
        base_model_name=module.base_model_name or None,
    )


def add_lora_options(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    """Add how much room there is for adapters."""
    group = _group(parser)
    group.add_argument(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        help="let requests name adapters (default: where the command line does)",
    )
    group.add_argument(
        "--max-loras",
        type=positive,
        default=defaults.max_loras,
        metavar="N",
        help="adapters on the device at once, and so most different ones in a step",
    )
    group.add_argument(
        "--max-lora-rank",
        type=int,
        choices=LORA_RANKS,
        default=defaults.max_lora_rank,
        help="largest rank of an adapter; each place on the device has room for it",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=positive,
        metavar="N",
        help="adapters kept in host memory; others are read again (default: --max-loras)",
    )
    group.add_argument(
        "--lora-dtype",
        choices=LORA_DTYPES,
        default=defaults.lora_dtype,
        help="type of adapters on the device; auto: the model's",
    )
    group.add_argument(
        "--lora-target-modules",
        nargs="+",
        metavar="MODULE",
        help="linear layers that adapters may change, such as q_proj; others take no memory "
        "(default: all)",
    )
    group.add_argument(
        "--fully-sharded-loras",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refused: over several devices adapters are split as the layers that they change",
    )


def add_lora_module_option(parser: argparse.ArgumentParser) -> None:
    """Add which adapters are served from the start."""
    _group(parser).add_argument(
        "--lora-modules",
        type=lora_module,
        nargs="+",
        action="extend",
        metavar="NAME=PATH|JSON",
        help='adapters, by the names that requests call them; as JSON {"name", "path", '
        '"base_model_name"}',
    )


def add_lora_path_option(parser: argparse.ArgumentParser) -> None:
    """Add the adapter of a command that has one model."""
    parser.add_argument(
        "--lora", dest="lora", type=lora_path, metavar="DIR", help="adapter to answer with"
    )


def _group(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Return the one group of a command's options about adapters."""
    title = "LoRA adapters"
    made = (group for group in parser._action_groups if group.title == title)
    return next(made, None) or parser.add_argument_group(
        title, "docs/serving.md says what they cost."
    )
