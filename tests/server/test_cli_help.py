"""Help as somebody meets it who knows nothing: texts, defaults, examples, and errors that help."""

import argparse
import re
import shlex

import pytest

from paged.server.cli import build_parser, main
from paged.server.cli_examples import EXAMPLES


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command's parser by its words."""
    found, todo = {}, [("", build_parser())]
    while todo:
        name, parser = todo.pop()
        found[name] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += [(f"{name} {word}".strip(), p) for word, p in action.choices.items()]
    return found


PARSERS = parsers()
OPTIONS = [
    (command, action)
    for command, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and not isinstance(action, argparse._HelpAction)
]


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def error_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_every_option_says_what_it_does():
    assert len(OPTIONS) > 200
    wordless = [
        (command, action.option_strings[0])
        for command, action in OPTIONS
        if not re.match(r"[\w`\"]", action.help or "")
    ]
    assert not wordless


def test_every_option_with_a_value_shows_its_default():
    silent = []
    for command, action in OPTIONS:
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if action.required or is_switch:
            continue
        text = PARSERS[command]._get_formatter()._get_help_string(action)
        match = re.search(r"\(default: ([^)]+)\)", text)
        if match is None or re.search(r"frozenset|None|False|True|\['|object at", match[1]):
            silent.append((command, action.option_strings[0], text))
    assert not silent


def test_every_value_has_a_name_that_says_its_unit():
    # What argparse makes of an option's own name would be one more way to say it.
    units = "A B BYTES GIB GiB GB/S MS N P,P RPS SECONDS SEED SHARE TFLOPS TOKENS X PERCENT PORT"
    numbers = {int, float, "size", "count", "rate", "ratio", "seconds", "positive", "gib"}
    nameless = []
    for command, action in OPTIONS:
        if action.nargs == 0 or action.choices is not None:
            continue
        shown = action.metavar or action.dest.upper()
        kind = getattr(action.type, "__name__", None)
        is_number = action.type in numbers or kind in numbers
        if "_" in str(shown) or (is_number and shown not in units.split()):
            nameless.append((command, action.option_strings[0], shown))
    assert not nameless


@pytest.mark.parametrize("command", PARSERS)
def test_help_fits_the_screen_and_ends_with_examples(capsys, command):
    text = help_of(capsys, *command.split(), "--help")
    assert max(map(len, text.splitlines())) <= 100
    assert "==SUPPRESS==" not in text
    usage = text.split("\n\n")[0]
    assert len(usage.splitlines()) == 1, "flags in brackets would hide what the command is for"
    assert usage.startswith(f"usage: paged {command}".strip())
    if command:
        assert "\nexamples:\n" in text
        assert f"  paged {command}" in text.partition("\nexamples:\n")[2]


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(PARSERS) - {""}


@pytest.mark.parametrize(
    ("command", "line"),
    [(command, line) for command, lines in EXAMPLES.items() for line in lines.strip().splitlines()],
)
def test_examples_can_be_pasted(command, line):
    assert len(line) <= 98
    words = shlex.split(line, comments=True)
    assert words[0] == "paged"
    if words[-1] == "--help":
        return
    if "<" in words:
        words = words[: words.index("<")]
    args = build_parser().parse_args(words[1:])
    assert f"{args.command} {getattr(args, 'bench', '')}".strip().startswith(command)


def test_overview_names_every_command_under_a_purpose(capsys):
    text = help_of(capsys, "--help")
    for command in PARSERS:
        if command and " " not in command:
            assert re.search(rf"^  {command} +\w", text, re.MULTILINE)
    assert "further commands" not in text
    assert text.index("run a model:") < text.index("  serve ") < text.index("plan, without")


def test_help_of_a_group_or_an_option_is_that_alone(capsys):
    text = help_of(capsys, "serve", "--help=prefix-cache")
    assert text.startswith("prefix cache:\n")
    assert "--prefix-cache-policy" in text
    assert "--port" not in text
    text = help_of(capsys, "serve", "MODEL", "--help=max_model_len")
    assert text.split()[0] == "--max-model-len"
    assert "longest prompt plus output" in text
    assert len(text.splitlines()) <= 3
    assert help_of(capsys, "serve", "--help=all") == help_of(capsys, "serve", "--help")
    assert "--batch-size" in help_of(capsys, "bench", "latency", "--help=batch-size")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["sevre"], ["did you mean serve?"]),
        (["bench", "throughputs"], ["did you mean throughput?"]),
        (
            ["serve", "--max-model-length", "3"],
            ["usage: paged serve [options]", "did you mean --max-model-len?", "paged serve --help"],
        ),
        (["serve", "--max-model-length=3"], ["did you mean --max-model-len?"]),
        (["bench", "serve", "--requestrate=3"], ["usage: paged bench serve", "--request-rate?"]),
        (["serve", "--dtype", "bfloat"], ["did you mean bfloat16?"]),
        (["serve", "--zzz"], ["unrecognized arguments: --zzz\n"]),
        (["serve", "--help=memroy"], ["there is no such group or option", "did you mean memory?"]),
    ],
)
def test_what_was_mistyped_is_answered_with_the_nearest(capsys, arguments, messages):
    error = error_of(capsys, *arguments)
    for message in messages:
        assert message in error
    assert "--help'." in error
