"""`CommandParser`: help with defaults, groups and examples; errors that name the nearest."""

import argparse
import difflib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_WIDTH = 100


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of everything that takes a value; keeps the lines of indented texts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=_WIDTH)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if is_switch or action.required or not action.option_strings or "(default:" in text:
            return text
        return f"{text} (default: {_shown(action).replace('%', '%%')})"

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            # Only what there is to choose from: the usage says what the place is called.
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(b if "\n  " in b else fill(b, width, indent) for b in blocks)


class CommandParser(argparse.ArgumentParser):
    """A parser, also of the commands below it, with these manners:

    - `--help=GROUP` and `--help=OPTION` print one group of options, or one option;
    - a mistyped command, choice or option is answered with the nearest one that there is.

    Args:
      examples: lines at the end of the help, a command each.
    """

    def __init__(self, *, examples: str = "", **settings: Any) -> None:
        if examples:
            lines = "".join(f"  {line}\n" for line in examples.strip().splitlines())
            more = settings.get("epilog") or ""
            settings["epilog"] = f"examples:\n{lines}\n{more}"
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        for action in self._actions:
            if isinstance(action, argparse._HelpAction):
                action.help = "show this; --help=NAME shows one group of options, or one option"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; `--help=NAME` before anything else that may be wrong or missing."""
        given = list(sys.argv[1:] if args is None else args)
        commands = {name for each in self._commands() for name in each.choices}
        for argument in given:
            if argument == "--" or argument in commands:
                break  # what follows belongs to somebody else
            if argument.startswith("--help="):
                self._print_part(argument.removeprefix("--help="))
        return super().parse_known_args(given, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; refuse unknown options in the name of the command that does not know them."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._parser_of(parsed)
            parser.error(
                f"unrecognized arguments: {' '.join(unknown)}{parser._nearest_option(unknown[0])}"
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print usage and message, say where help is, and exit with 2."""
        super().error(f"{message}\nTry '{self.prog} --help'.")

    def find_part(self, name: str) -> list[tuple[str | None, list[argparse.Action]]]:
        """Return the groups of options of this name, or the one option, under no title."""
        wanted = name.strip().lower().lstrip("-").replace("_", "-")
        for action in self._actions:
            if wanted in (option.lstrip("-") for option in action.option_strings):
                return [(None, [action])]
        groups = [(group.title, group._group_actions) for group in self._action_groups]
        if wanted == "all":
            return [(title, actions) for title, actions in groups if actions]
        return [
            (title, actions)
            for title, actions in groups
            if title and wanted and wanted in title.lower().replace(" ", "-")
        ]

    def _print_part(self, name: str) -> NoReturn:
        if name == "all":
            self.print_help()
            self.exit()
        parts = self.find_part(name)
        if not parts:
            titles = [
                group.title.replace(" ", "-")
                for group in self._action_groups
                if group.title and group._group_actions
            ]
            options = [option for action in self._actions for option in action.option_strings]
            known = [*titles, *(option.lstrip("-") for option in options)]
            self.error(
                f"--help={name}: there is no such group or option{_nearest(name, known)}; groups "
                f"are {', '.join(titles)}"
            )
        formatter = self._get_formatter()
        for title, actions in parts:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        print(formatter.format_help(), end="")
        self.exit()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if action.choices is not None:
                error.message += _nearest(str(value), list(map(str, action.choices)))
            raise

    def _nearest_option(self, argument: str) -> str:
        option = argument.partition("=")[0]
        if not option.startswith("-"):
            return ""
        return _nearest(option, [name for each in self._actions for name in each.option_strings])

    def _parser_of(self, parsed: argparse.Namespace) -> "CommandParser":
        """Return the parser of the command that was chosen."""
        for action in self._commands():
            chosen = action.choices.get(getattr(parsed, action.dest, ""))
            if isinstance(chosen, CommandParser):
                return chosen._parser_of(parsed)
        return self

    def _commands(self) -> "list[argparse._SubParsersAction[argparse.ArgumentParser]]":
        return [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return the question that a mistyped name deserves, empty if nothing is like it."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _shown(action: argparse.Action) -> str:
    """Return a default as somebody would type it."""
    default = action.default
    if isinstance(default, bool) and isinstance(action, argparse.BooleanOptionalAction):
        return "on" if default else "off"
    if default is None:
        return "not set"
    if isinstance(default, str):
        return default or "none"
    if isinstance(default, list | tuple | dict | set | frozenset):
        if action.metavar == "JSON":
            return json.dumps(default)
        return ", ".join(map(str, default)) or "none"
    if isinstance(default, float) and math.isfinite(default):
        return f"{default:g}"
    return str(default)
