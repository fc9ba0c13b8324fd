"""Grammars that leave a model nothing but calls: in its own format, arguments by their schemas.

What allows JSON by a schema is said in one place (`paged.scheduler.structured.grammar_text`): the
grammars here only name the rules of arguments, and the schemas go beside them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ARGUMENTS = "arguments_"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written, one and only one way.

    `begin` (`before_name` name `after_name` arguments `after_arguments`), once or more with
    `separator` between them, `end`.

    Attributes:
      mark: that it begins with and no other text has; "" if there is none.
      plain_begin, plain_text: where there is no mark, how an answer without calls is told apart: a
        fixed beginning, and the pattern of the rest; no pattern: it cannot be.
    """

    mark: str = ""
    plain_begin: str = ""
    plain_text: str = ""
    begin: str = ""
    before_name: str
    after_name: str
    after_arguments: str = ""
    separator: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that can be called.

    Attributes:
      name: as the model writes it.
      parameters: JSON schema of an object.
    """

    name: str
    parameters: Mapping[str, Any]


def call_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    is_single: bool,
    mark_ids: Mapping[str, int],
    prefix: Sequence[str] = (),
) -> str:
    """Return the grammar of at least one call, in llguidance's dialect of Lark.

    It leaves out the rules of `argument_schemas`.

    Args:
      form: of the calls.
      functions: that may be called.
      is_single: no call follows on the first.
      mark_ids: ids of the marks that are tokens of their own: no text spells those.
      prefix: rules of what comes first, the first of them `prefix`.

    Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
    """
    start = ["prefix"] if prefix else []
    start += [spell(form.begin, mark_ids), "call"]
    if not is_single:
        separator = spell(form.separator, mark_ids)
        start.append(f"({separator} call)*")
        if form.separator.isspace():
            # A model that has written it, as it would before any text, need not call once more.
            start.append(f"{separator}?")
    start.append(spell(form.end, mark_ids))
    rules = [f"start: {' '.join(filter(None, start))}", *prefix]
    return "\n".join([*rules, *_call_rules(form, functions, mark_ids)]) + "\n"


def free_text_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    mark_ids: Mapping[str, int],
    prefix: Sequence[str] = (),
) -> str:
    """Return the grammar of an answer whose calls, if it has any, are right.

    Takes what `call_grammar` takes; the form must have a mark or a pattern of plain text.
    """
    start = "prefix " if prefix else ""
    if form.mark:
        if form.begin:
            form = dataclasses.replace(form, begin=form.begin.removeprefix(form.mark))
        else:
            form = dataclasses.replace(form, before_name=form.before_name.removeprefix(form.mark))
        calls = _several(form, mark_ids) if form.begin else "call"
        start += f"(announcement {calls})* TEXT"
        text = _text_without(form.mark)
        rules = rules_up_to("announcement", form.mark, mark_ids)
    else:
        start += f"({_several(form, mark_ids)} | {spell(form.plain_begin, mark_ids)} TEXT)"
        text, rules = f"/{form.plain_text}/", []
    rules = [f"start: {start}", *prefix, *rules, f"TEXT: {text}"]
    return "\n".join([*rules, *_call_rules(form, functions, mark_ids)]) + "\n"


def _several(form: CallForm, mark_ids: Mapping[str, int]) -> str:
    """Return the rule of one call or more; without a separator, of one."""
    more = f"({spell(form.separator, mark_ids)} call)*" if form.separator else ""
    return f"{spell(form.begin, mark_ids)} call {more} {spell(form.end, mark_ids)}"


def rules_up_to(name: str, mark: str, mark_ids: Mapping[str, int]) -> list[str]:
    """Return the rules, the first of that name, of any text up to and with the first mark."""
    if mark in mark_ids:
        return [
            f"{name}: {name.upper()} <[{mark_ids[mark]}]>",
            f"{name.upper()}: {_text_without(mark)}",
        ]
    # The lexer takes as much as it can: a mark of many characters has to be part of the lexeme.
    return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]


def _call_rules(
    form: CallForm, functions: Sequence[Function], mark_ids: Mapping[str, int]
) -> list[str]:
    tail = spell(form.after_arguments, mark_ids)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        name = json.dumps(function.name)[1:-1]
        head = spell(form.before_name + name + form.after_name, mark_ids)
        rules.append(f"call_{i}: {head} {_ARGUMENTS}{i} {tail}")
    return rules


def argument_schemas(functions: Sequence[Function]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the rules that grammars of these functions leave out."""
    return {f"{_ARGUMENTS}{i}": function.parameters for i, function in enumerate(functions)}


def _text_without(mark: str) -> str:
    """Return the terminal of any text that does not hold a mark."""
    pattern = re.escape(mark).replace("/", r"\/")
    return f"/(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/"


def spell(literal: str, mark_ids: Mapping[str, int]) -> str:
    """Return the rule of a fixed text, marks by their ids; "" for no text."""
    if not literal:
        return ""
    marks = "|".join(map(re.escape, sorted(mark_ids, key=len, reverse=True)))
    pieces = re.split(f"({marks})", literal) if marks else [literal]
    return " ".join(
        f"<[{mark_ids[piece]}]>" if piece in mark_ids else json.dumps(piece)
        for piece in pieces
        if piece
    )
