"""The `paged` command: `serve`, `chat`, `generate`, `run-batch`, `plan`, `simulate` and more.

Parsing needs neither JAX nor aiohttp, so that `paged --help` answers at once; each command imports
what it needs when it runs. The files `cli*.py` are the only ones that read the environment.
"""

import argparse
import importlib
import pathlib
import sys
from collections.abc import Sequence

from paged._version import __version__
from paged.scheduler.buckets import FEW_SEQS
from paged.server.cli_bench_options import add_bench_commands
from paged.server.cli_doctor_options import add_doctor_options
from paged.server.cli_engine_options import (
    add_convert_options,
    add_engine_options,
    add_native_cache_option,
)
from paged.server.cli_errors import UserError
from paged.server.cli_examples import EXAMPLES
from paged.server.cli_help import CommandParser
from paged.server.cli_lora_options import add_lora_module_option, add_lora_path_option
from paged.server.cli_network_options import (
    add_answer_options,
    add_limit_options,
    add_network_options,
)
from paged.server.cli_observability_options import add_observability_options
from paged.server.cli_options import (
    add_batch_options,
    add_client_options,
    add_sampling_options,
    add_server_options,
    dashed,
)
from paged.server.cli_plan_options import add_plan_options
from paged.server.cli_simulate_options import add_simulate_options

_DESCRIPTION = """\
LLM inference in JAX on a paged KV cache.

MODEL is a directory in Hugging Face's format, a GGUF file, or an id on the Hugging Face Hub;
without it, the demo model SmolLM2-135M-Instruct is used.
"""

_FIRST_STEPS = """\
first steps:
  paged chat                         talk to the demo model
  paged serve MODEL                  then point any OpenAI client at http://localhost:8000/v1
  paged plan MODEL --gpu h100        before renting one
  paged COMMAND --help               all options of a command, and examples
  paged COMMAND --help=memory        those of one group; --help=port: one option
"""

_ENVIRONMENT = """\
environment: $PAGED_MODELS_CACHE is the folder that the demo model is downloaded to and found in
(default: ~/.cache/paged-models).
"""

_SERVER_SWITCHES = """\
$PAGED_SERVER_DEV_MODE=1 (or $VLLM_SERVER_DEV_MODE=1) lets the server answer POST
/reset_prefix_cache; $PAGED_ALLOW_RUNTIME_LORA_UPDATING=1 (or $VLLM_...) lets its clients load LoRA
adapters from any folder of this machine.
"""

# What a command is for, and the commands for it.
_PURPOSES = {
    "run a model": ("serve", "chat", "generate", "run-batch"),
    "look at a server": ("doctor", "bench"),
    "plan, without a GPU": ("plan", "simulate"),
    "prepare a model, or a machine": ("convert", "compile", "build-native"),
}

# Command -> module with `run(args) -> int`.
_COMMANDS = {
    "serve": "paged.server.cli_serve",
    "chat": "paged.server.cli_chat",
    "generate": "paged.server.cli_generate",
    "run-batch": "paged.server.cli_run_batch",
    "compile": "paged.server.cli_compile",
    "convert": "paged.server.cli_convert",
    "plan": "paged.server.cli_plan",
    "simulate": "paged.server.cli_simulate",
    "doctor": "paged.server.cli_doctor",
    "bench": "paged.server.cli_bench",
    "build-native": "paged.server.cli_build_native",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 an error that a message on standard error explains, 130 an interruption.
    Arguments that cannot be parsed exit with 2, from within.
    """
    args = build_parser().parse_args(dashed(sys.argv[1:] if argv is None else argv))
    try:
        command = importlib.import_module(_COMMANDS[args.command])
        status: int = command.run(args)
    except UserError as error:
        print(f"paged: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1  # the reader of our output, such as `head`, has seen enough
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> CommandParser:
    """Return the parser of all commands."""
    parser = CommandParser(prog="paged", usage="paged COMMAND [options]", epilog=_FIRST_STEPS)
    parser.add_argument(
        "-v", "--version", action="version", version=f"paged {__version__}", help="show the version"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="paged", help=argparse.SUPPRESS
    )
    for add in (
        _add_serve,
        _add_chat,
        _add_generate,
        _add_run_batch,
        _add_compile,
        _add_convert,
        _add_plan,
        _add_simulate,
        _add_bench,
        _add_doctor,
        _add_build_native,
    ):
        add(commands)
    parser.description = f"{_DESCRIPTION}\n{_overview(commands)}"
    return parser


type _Commands = argparse._SubParsersAction[CommandParser]


def _add_serve(commands: _Commands) -> None:
    serve = _add_command(commands, "serve", "serve a model over an OpenAI-compatible HTTP API")
    add_server_options(serve)
    add_observability_options(serve)
    add_network_options(serve)
    add_limit_options(serve)
    add_answer_options(serve)
    add_engine_options(serve, log_level="info")
    add_lora_module_option(serve)


def _add_chat(commands: _Commands) -> None:
    chat = _add_command(commands, "chat", "chat with a model in the terminal")
    chat.add_argument("--system-prompt", metavar="TEXT", help="instructions for the model")
    add_lora_path_option(chat)
    chat.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer")
    add_client_options(chat)
    add_sampling_options(chat, max_tokens=None)
    # For one user fewer shapes have to be compiled, which is most of a first start.
    add_engine_options(chat, log_level="warning", max_num_seqs=FEW_SEQS)


def _add_generate(commands: _Commands) -> None:
    generate = _add_command(commands, "generate", "continue prompts and print the text")
    generate.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; repeat for several; without any, standard input is the prompt",
    )
    add_lora_path_option(generate)
    add_client_options(generate)
    add_sampling_options(generate, max_tokens=128)
    # All prompts are queued before the first step, so the queue says what will be needed.
    add_engine_options(
        generate, log_level="warning", max_num_seqs=FEW_SEQS, prefix_cache_policy="lookahead"
    )


def _add_run_batch(commands: _Commands) -> None:
    run_batch = _add_command(
        commands, "run-batch", "answer the requests of a batch file", required="-i FILE -o FILE "
    )
    add_batch_options(run_batch)
    add_client_options(run_batch)
    # As `generate`; many requests are there at once, so the limit on sequences stays.
    add_engine_options(run_batch, log_level="warning", prefix_cache_policy="lookahead")
    add_lora_module_option(run_batch)


def _add_compile(commands: _Commands) -> None:
    compile_command = _add_command(
        commands,
        "compile",
        "export a model's programs, for `serve --artifact`",
        required="--out DIR ",
    )
    compile_command.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPU to compile for, present or not: a100, h100, h200, b200; needs the extra `aot` "
        "(default: the device of this machine)",
    )
    compile_command.add_argument(
        "--out", metavar="DIR", type=pathlib.Path, required=True, help="folder; new or empty"
    )
    add_engine_options(compile_command, log_level="info")


def _add_convert(commands: _Commands) -> None:
    convert = _add_command(
        commands,
        "convert",
        "write a checkpoint in the engine's own format",
        required="--out DIR ",
    )
    add_convert_options(convert)


def _add_plan(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan",
        examples=EXAMPLES["plan"],
        help="say what a model needs of a GPU, how fast it should be, which flags to use",
        usage="paged plan [options] [MODEL]",
        description="What fits on which GPU, and what to expect of it, from the model's config and "
        "published figures; nothing is loaded and no GPU is needed.",
    )
    add_plan_options(plan)


def _add_simulate(commands: _Commands) -> None:
    simulate = commands.add_parser(
        "simulate",
        examples=EXAMPLES["simulate"],
        help="serve a trace without a model: cache hits, latency, memory",
        usage="paged simulate [options]",
        description="Serve a trace with the real scheduler and block pool, without a model.",
    )
    add_simulate_options(simulate)


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser(
        "bench",
        examples=EXAMPLES["bench"],
        help="measure throughput, latency, or a running server",
        usage="paged bench BENCHMARK [options]",
        description="Measure an engine in this process, or a server over HTTP.",
        epilog=_ENVIRONMENT,
    )
    add_bench_commands(bench)


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        examples=EXAMPLES["doctor"],
        help="ask a running server what holds its requests back",
        usage="paged doctor [options] URL",
        description="Read a server's metrics twice and say which resource is the bottleneck, on "
        "what evidence, and which flag to turn; or show where two prompts stop sharing the cache.",
    )
    add_doctor_options(doctor)


def _add_build_native(commands: _Commands) -> None:
    build_native = commands.add_parser(
        "build-native",
        examples=EXAMPLES["build-native"],
        help="compile the C++ kernels for a CPU ahead of the first start",
        usage="paged build-native [options]",
        description="Compile the C++ kernels that a CPU uses, or find them compiled; print where "
        "they are and which instructions this CPU runs. Needs a C++ compiler.",
    )
    add_native_cache_option(build_native)


def _overview(commands: _Commands) -> str:
    """Return the commands with a line each, by what they are for."""
    texts = {each.dest: each.help for each in commands._choices_actions}
    purposes = dict(_PURPOSES)
    if others := tuple(name for name in texts if name not in sum(_PURPOSES.values(), ())):
        purposes["further commands"] = others
    return "\n\n".join(
        "\n".join([f"{purpose}:", *(f"  {name:<14}{texts[name]}" for name in names)])
        for purpose, names in purposes.items()
    )


def _add_command(
    commands: _Commands,
    name: str,
    text: str,
    *,
    required: str = "",
) -> CommandParser:
    """Add a command that takes a model; `required` is what its usage must show."""
    command = commands.add_parser(
        name,
        help=text,
        # Sixty flags in brackets would hide what the command is for.
        usage=f"paged {name} [options] {required}[MODEL]",
        description=text[0].upper() + text[1:] + ".",
        epilog=_ENVIRONMENT + (_SERVER_SWITCHES if name == "serve" else ""),
        examples=EXAMPLES[name],
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory, GGUF file or Hub id (default: SmolLM2-135M-Instruct)",
    )
    return command


if __name__ == "__main__":
    sys.exit(main())
