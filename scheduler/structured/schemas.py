"""`rewrite_schema`: a JSON schema as the grammar library has to see it for outputs to be valid."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NOT_SCHEMAS = ("const", "enum", "default", "examples", "required")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")

# The library's own dates have a 29th of February every year and a year 0, its times leap seconds
# and any number of digits, which most parsers refuse.
_MONTHS = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = (
    "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # not 0000
)
_DATE = f"({_YEAR}-({_MONTHS})|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
# Where a pattern may match anywhere, what precedes the match: a model that rambles would never come
# to it, as nothing in its masks says so.
_MAX_BEFORE_MATCH = 128
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ANCHORS = re.compile(r"[$^]|\\[Az]")

_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


_COMBINERS = ("allOf", "anyOf", "oneOf", "$ref")
_SAY_PROPERTIES = ("properties", "patternProperties")


def rewrite_schema(
    schema: Mapping[str, Any], *, closes_objects: bool, bounds_patterns: bool = True
) -> dict[str, Any]:
    """Return a schema that allows nothing that the given one does not.

    Args:
      schema: within the limits on depth.
      closes_objects: forbid additional properties where nothing is said about them, unless several
        schemas say together which properties there are.
      bounds_patterns: have a match of a pattern without an anchor begin within so many characters.
    """
    rewriter = _Rewriter(closes_objects, bounds_patterns, _refs_into_parts(schema))
    return rewriter.rewrite(schema)


@dataclass(frozen=True, slots=True)
class _Rewriter:
    """See `rewrite_schema`; schemas that `part_refs` name are parts of others."""

    closes_objects: bool
    bounds_patterns: bool
    part_refs: frozenset[str]

    def rewrite(
        self, schema: Mapping[str, Any], *, is_part: bool = False, is_exclusive: bool = False
    ) -> dict[str, Any]:
        """Rewrite a schema.

        Args:
          schema: the schema.
          is_part: it is one of several that hold for the same value.
          is_exclusive: it must stay as wide as it is, for the library to see that alternatives
            exclude each other.
        """
        is_part = is_part or _is_combined(schema)
        rewritten: dict[str, Any] = {}
        for name, value in schema.items():
            exclusive = is_exclusive or name == "oneOf"
            if name in _NOT_SCHEMAS:
                rewritten[name] = value
            elif name in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                rewritten[name] = {
                    key: self._value(inner, f"#/{name}/{key}" in self.part_refs, exclusive)
                    for key, inner in value.items()
                }
            else:
                rewritten[name] = self._value(value, is_part and name in _COMBINERS, exclusive)
        if self.closes_objects and not is_part and _names_its_properties(schema):
            rewritten.setdefault("additionalProperties", False)
        searched = rewritten.get("pattern")
        if self.bounds_patterns and not is_exclusive and isinstance(searched, str):
            rewritten["pattern"] = _bounded(searched)
        if rewritten.get("uniqueItems") is False:
            del rewritten["uniqueItems"]  # which the library refuses in any case
        pattern = _PATTERNS.get(str(rewritten.get("format")))
        if pattern is not None and "pattern" not in rewritten:
            del rewritten["format"]
            rewritten["pattern"] = pattern
        return rewritten

    def _value(self, value: Any, is_part: bool, is_exclusive: bool) -> Any:
        """Rewrite what may be a schema, or a list of them."""
        if isinstance(value, Mapping):
            return self.rewrite(value, is_part=is_part, is_exclusive=is_exclusive)
        if isinstance(value, list | tuple):
            return [self._value(inner, is_part, is_exclusive) for inner in value]
        return value


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether a schema and those in it, or several of those, say which properties there are."""
    saying = [name for name in (*_COMBINERS, *_SAY_PROPERTIES) if name in schema]
    combiners = [name for name in saying if name in _COMBINERS]
    if not combiners:
        return False
    members = schema.get("allOf")
    parts = members if isinstance(members, list | tuple) else ()
    several = [
        part
        for part in parts
        if isinstance(part, Mapping) and any(n in part for n in (*_COMBINERS, *_SAY_PROPERTIES))
    ]
    return len(saying) > 1 or len(several) > 1


def _names_its_properties(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says which properties there are, all that it requires among them."""
    if "patternProperties" in schema:
        return True
    properties, required = schema.get("properties"), schema.get("required", ())
    return isinstance(properties, Mapping) and all(name in properties for name in required)


def _refs_into_parts(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the references to schemas that are parts of others."""
    found: set[str] = set()

    def visit(node: Any, is_part: bool) -> None:
        if isinstance(node, list | tuple):
            for inner in node:
                visit(inner, is_part)
        if not isinstance(node, Mapping):
            return
        is_part = is_part or _is_combined(node)
        ref = node.get("$ref")
        if is_part and isinstance(ref, str) and ref not in found:
            found.add(ref)
            _, kind, key, *_ = [*ref.split("/"), "", ""]
            definitions = schema.get(kind)
            if isinstance(definitions, Mapping):
                visit(definitions.get(key), True)
        for name, inner in node.items():
            if name in _MAPS_OF_SCHEMAS and isinstance(inner, Mapping):
                for value in inner.values():
                    visit(value, False)
            elif name not in _NOT_SCHEMAS:
                visit(inner, is_part and name in _COMBINERS)

    visit(schema, False)
    return frozenset(found)


def _bounded(pattern: str) -> str:
    """Return a pattern whose match begins soon, unless it says itself where."""
    if _has_anchor(pattern):
        return pattern
    return f"^(?s:.{{0,{_MAX_BEFORE_MATCH}}})(?:{pattern})"


def _has_anchor(pattern: str) -> bool:
    """Whether a pattern says where in the text it matches."""
    plain = _ESCAPED_OR_CLASS.sub(lambda m: m[0] if m[0] in (r"\A", r"\z") else "", pattern)
    return _ANCHORS.search(plain) is not None
