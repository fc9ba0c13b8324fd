"""`StructuredOutputs`: what one request's output must look like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged.scheduler.params import ParameterError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The ways to say it, of which a request uses one."""

_SOURCE = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The constraint of a request's output: exactly one of the first six.

    Attributes:
      json: a JSON schema, as text or parsed; properties are generated in its order.
      regex: a regular expression that the whole output matches (Rust's syntax, no look-around).
      choice: texts, one of which is the output.
      grammar: a context-free grammar, in EBNF (`root ::= ...`, as llama.cpp's GBNF) or Lark
        (`start: ...`).
      json_object: True: any JSON object.
      structural_tag: free text in which each trigger opens a tag whose content obeys a schema, as
        text or parsed: `{"triggers": [...], "structures": [{"begin", "schema", "end"}]}`.
      disable_any_whitespace: write JSON without white space. False lets the model place it freely,
        with which a small model may fill its whole output. None: as the engine's settings say.
      disable_additional_properties: objects of the schema have no properties that it does not
        name, unless it says so itself. None: as the engine's settings say.
      whitespace_pattern: regular expression of the white space in JSON, instead.
      schemas: JSON schemas by the names of rules that `grammar`, in Lark, uses and leaves out.
      spaces_json: JSON without other white space has a space behind each comma and colon.
      source: the field of the caller's request that errors name.

    Raises:
      ParameterError: if not exactly one is given, or it is empty or of the wrong type. Whether it
        can be compiled is found out later (`paged.scheduler.structured.compiler`).

    Source: vLLM `sampling_params.py`, `StructuredOutputsParams`.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    spaces_json: bool = False
    source: str = field(default=_SOURCE, compare=False)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ParameterError(self.source, given, f"must have exactly one of {', '.join(KINDS)}")
        if self.schemas and self.grammar is None:
            raise self._error("schemas", "must stand beside a grammar that uses them")
        self._check_texts()
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.json_object is not None and self.json_object is not True:
            raise self._error("json_object", "must be true; leave it out otherwise")
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._parsed(name))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise self._error(name, "must be true or false")

    @property
    def kind(self) -> str:
        """Which of `KINDS` it uses."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def refuse(self, rule: str, *, value: object = None) -> ParameterError:
        """Return the error that names this constraint, and the rule that it breaks.

        Args:
          rule: what must be.
          value: what is there, where the constraint itself is too long to be shown.
        """
        # A grammar around schemas is not what the request has sent; those are.
        return self._error(self.kind, rule, value or list(self.schemas.values()) or None)

    def field_of(self, name: str) -> str:
        """Return the field of the caller's request that holds one of these."""
        is_whole = self.source != _SOURCE  # a field that says nothing else
        return self.source if is_whole else f"{self.source}.{name}"

    def _error(self, name: str, rule: str, value: object = None) -> ParameterError:
        parameter = self.field_of(name)
        return ParameterError(parameter, getattr(self, name) if value is None else value, rule)

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value.strip():
                raise self._error(name, "must be a text that is not empty")
            if "\0" in value:
                raise self._error(name, "must not contain NUL")

    def _check_choice(self, choice: Sequence[str]) -> None:
        is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
        if not is_list or not choice or not all(isinstance(c, str) and c for c in choice):
            raise self._error("choice", "must be a list of at least one text, none of them empty")
        object.__setattr__(self, "choice", tuple(choice))

    def _parsed(self, name: str) -> Any:
        """Return a field that may be given as JSON text, parsed."""
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self._error(name, "must be JSON") from None
        if not isinstance(value, Mapping) and not (name == "json" and isinstance(value, bool)):
            raise self._error(name, "must be a JSON object")
        return value
