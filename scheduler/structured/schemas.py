"""`rewrite_schema`: a JSON schema as the grammar library has to see it for outputs to be valid."""

import re
from collections.abc import Mapping
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


def rewrite_schema(
    schema: Mapping[str, Any], *, closes_objects: bool, bounds_patterns: bool = True
) -> dict[str, Any]:
    """Return a schema that allows nothing that the given one does not.

    Args:
      schema: within the limits on depth.
      closes_objects: forbid additional properties where nothing is said about them.
      bounds_patterns: have a match of a pattern without an anchor begin within so many characters.
    """
    rewritten: dict[str, Any] = {}
    for name, value in schema.items():
        # Alternatives must stay as wide as they are for the library to see that they exclude
        # each other.
        bounds = bounds_patterns and name != "oneOf"
        if name in _NOT_SCHEMAS:
            rewritten[name] = value
        elif name in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            rewritten[name] = {
                key: _rewrite(inner, closes_objects=closes_objects, bounds_patterns=bounds)
                for key, inner in value.items()
            }
        else:
            rewritten[name] = _rewrite(value, closes_objects=closes_objects, bounds_patterns=bounds)
    if closes_objects and ("properties" in rewritten or "patternProperties" in rewritten):
        rewritten.setdefault("additionalProperties", False)
    searched = rewritten.get("pattern")
    if bounds_patterns and isinstance(searched, str) and not _has_anchor(searched):
        rewritten["pattern"] = f"^(?s:.{{0,{_MAX_BEFORE_MATCH}}})(?:{searched})"
    if rewritten.get("uniqueItems") is False:
        del rewritten["uniqueItems"]  # which the library refuses in any case
    pattern = _PATTERNS.get(str(rewritten.get("format")))
    if pattern is not None and "pattern" not in rewritten:
        del rewritten["format"]
        rewritten["pattern"] = pattern
    return rewritten


def _has_anchor(pattern: str) -> bool:
    """Whether a pattern says where in the text it matches."""
    plain = _ESCAPED_OR_CLASS.sub(lambda m: m[0] if m[0] in (r"\A", r"\z") else "", pattern)
    return _ANCHORS.search(plain) is not None


def _rewrite(value: Any, *, closes_objects: bool, bounds_patterns: bool) -> Any:
    """Rewrite what may be a schema, or a list of them."""
    if isinstance(value, Mapping):
        return rewrite_schema(value, closes_objects=closes_objects, bounds_patterns=bounds_patterns)
    if isinstance(value, list | tuple):
        return [
            _rewrite(inner, closes_objects=closes_objects, bounds_patterns=bounds_patterns)
            for inner in value
        ]
    return value
