"""Grammars that leave a model nothing but calls: in its own format, arguments by their schemas."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written, one and only one way.

    `begin` (`before_name` name `after_name` arguments `after_arguments`), once or more with
    `separator` between them, `end`.
    """

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
    special_ids: Mapping[str, int],
    prefix: Sequence[str] = (),
) -> str:
    """Return the grammar of at least one call, in llguidance's dialect of Lark.

    Args:
      form: of the calls.
      functions: that may be called.
      is_single: no call follows on the first.
      special_ids: ids of the marks that are special tokens: no text spells those.
      prefix: rules that come first; the first is named `prefix`.

    Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
    """

    def text(literal: str) -> str:
        return spell(literal, special_ids)

    start = ["prefix"] if prefix else []
    start += [text(form.begin), "call"]
    if not is_single:
        start.append(f"({text(form.separator)} call)*")
    start.append(text(form.end))
    rules = [
        f"start: {' '.join(filter(None, start))}",
        *prefix,
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
    ]
    for i, function in enumerate(functions):
        head = text(form.before_name + json.dumps(function.name)[1:-1] + form.after_name)
        rules.append(f"call_{i}: {head} arguments_{i} {text(form.after_arguments)}")
        rules.append(f"arguments_{i}: %json {json.dumps(_compact(function.parameters))}")
    return "\n".join(rules) + "\n"


def spell(literal: str, special_ids: Mapping[str, int]) -> str:
    """Return the rule of a fixed text, its special tokens by their ids; "" for no text."""
    if not literal:
        return ""
    marks = sorted(special_ids, key=len, reverse=True)
    pieces = re.split("|".join(f"({re.escape(mark)})" for mark in marks), literal)
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else json.dumps(piece)
        for piece in pieces
        if piece
    )


def _compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose JSON is spaced as templates space it, in one way only.

    A model that may choose its whitespace may fill its whole output with it.
    """
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": spacing}
