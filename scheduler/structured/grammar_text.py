"""`grammar_text`: what a request asks for, in the language of the grammar library.

JSON schemas are translated by the library itself, which names what it does not support; only what
it would ignore or overrule is looked at here.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from paged.scheduler.params import ParameterError
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.params import StructuredOutputs
from paged.scheduler.structured.schemas import rewrite_schema

_ANY_OBJECT = {"type": "object"}
# Options for the library that a schema may carry; they could make it ignore what it cannot do.
_LIBRARY_OPTIONS = "x-guidance"


def constraint_source(outputs: StructuredOutputs, config: StructuredOutputsConfig) -> str:
    """Return a text that says everything about a constraint, once it is within the limits.

    Raises: ParameterError if it is too long or nested too deeply.
    """
    values = [getattr(outputs, outputs.kind), *outputs.schemas.values()]
    _check_limits(outputs, values, config)
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    is_closed = outputs.disable_additional_properties
    options = sorted(_options(outputs, config).items())
    return json.dumps([outputs.kind, texts, list(outputs.schemas), is_closed, options])


def grammar_text(
    outputs: StructuredOutputs, config: StructuredOutputsConfig, *, narrows: bool = True
) -> str:
    """Return the grammar of a constraint that `constraint_source` has let through.

    Args:
      outputs: the constraint.
      config: how JSON is written.
      narrows: leave out what only makes outputs longer: texts before the match of a pattern, and
        additional properties unless the request says so (`rewrite_schema`).

    Raises: ParameterError if it is seen here that there can be none.
    """
    value = getattr(outputs, outputs.kind)
    try:
        match outputs.kind:
            case "json":
                schema = _checked_schema(outputs, value, config, narrows)
                return _from_schema(schema, outputs, config)
            case "json_object":
                return _from_schema(_ANY_OBJECT, outputs, config)
            case "regex":
                return LLMatcher.grammar_from_regex(value)
            case "choice":
                spelled = [json.dumps(text, ensure_ascii=False) for text in value]
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(spelled)}")
            case "grammar":
                rules = _rules_of_schemas(outputs, config, narrows)
                return LLMatcher.grammar_from_lark("\n".join([any_to_lark(value), *rules]))
            case _:
                return _from_tags(outputs, value, config, narrows)
    except ParameterError:
        raise
    except RecursionError:
        raise outputs.refuse("is nested too deeply") from None
    except Exception as error:  # the library's converters raise nothing more specific
        raise outputs.refuse(f"cannot be compiled: {error}") from None


def _options(outputs: StructuredOutputs, config: StructuredOutputsConfig) -> dict[str, Any]:
    """Return the options of the library for JSON; each is given, so that no schema decides."""
    compact = outputs.disable_any_whitespace
    if compact is None:
        compact = config.disable_any_whitespace and outputs.whitespace_pattern is None
    options = {"whitespace_flexible": not compact, "coerce_one_of": False, "lenient": False}
    if outputs.whitespace_pattern is not None:
        return options | {"whitespace_pattern": outputs.whitespace_pattern}
    if compact and outputs.spaces_json:
        return options | {"item_separator": ", ", "key_separator": ": "}
    return options


def _from_schema(
    schema: Mapping[str, Any], outputs: StructuredOutputs, config: StructuredOutputsConfig
) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        overrides=_options(outputs, config),  # type: ignore[arg-type]
    )


def _rules_of_schemas(
    outputs: StructuredOutputs, config: StructuredOutputsConfig, narrows: bool
) -> list[str]:
    """Return the rules that a grammar leaves to its schemas."""
    return [
        f"{name}: %json {json.dumps(_with_options(schema, outputs, config, narrows))}"
        for name, schema in outputs.schemas.items()
    ]


def _with_options(
    schema: Any, outputs: StructuredOutputs, config: StructuredOutputsConfig, narrows: bool
) -> dict[str, Any]:
    """Return a schema that is part of a grammar, with the options of the library in it."""
    checked = _checked_schema(outputs, schema, config, narrows)
    return {**checked, _LIBRARY_OPTIONS: _options(outputs, config)}


def _checked_schema(
    outputs: StructuredOutputs,
    schema: Any,
    config: StructuredOutputsConfig,
    narrows: bool,
) -> Mapping[str, Any]:
    """Return a schema as the library should see it."""
    if schema is False:
        raise outputs.refuse("allows no value at all")
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise outputs.refuse("must be a JSON object")
    is_closed = outputs.disable_additional_properties
    if is_closed is None:
        is_closed = narrows and config.disable_additional_properties
    rewritten = rewrite_schema(schema, closes_objects=is_closed, bounds_patterns=narrows)
    return {name: value for name, value in rewritten.items() if name != _LIBRARY_OPTIONS}


def _from_tags(
    outputs: StructuredOutputs,
    value: Mapping[str, Any],
    config: StructuredOutputsConfig,
    narrows: bool,
) -> str:
    """Return the grammar of free text with tags in it."""
    triggers, structures = value.get("triggers"), value.get("structures")
    if not isinstance(triggers, list) or not isinstance(structures, list) or not structures:
        raise outputs.refuse(
            'must be {"triggers": [text, ...], "structures": [{"begin": text, "schema": schema, '
            '"end": text}, ...]}'
        )
    tags = []
    for tag in structures:
        begin = tag.get("begin") if isinstance(tag, Mapping) else None
        end = tag.get("end", "") if isinstance(tag, Mapping) else None
        if not isinstance(begin, str) or not isinstance(end, str):
            raise outputs.refuse("must have texts as `begin` and `end` of each structure")
        trigger = next((t for t in triggers if t and begin.startswith(str(t))), None)
        if trigger is None:
            raise outputs.refuse(f"has no trigger that {begin!r} begins with")
        schema = _with_options(tag.get("schema", {}), outputs, config, narrows)
        tags.append(StructTag(trigger=str(trigger), begin=begin, grammar=schema, end=end))
    # Triggers are text here: what looks like a special token may be none of this model's.
    return StructTag.to_grammar(tags, assume_special=False)


def _check_limits(
    outputs: StructuredOutputs, values: Collection[Any], config: StructuredOutputsConfig
) -> None:
    """Refuse what is too large before anything is done with it; without recursion."""
    size = 0
    stack: list[tuple[Any, int]] = [(value, 0) for value in values]
    while stack:
        node, depth = stack.pop()
        size += _num_bytes(node)
        if isinstance(node, Mapping):
            size += sum(map(_num_bytes, node))
        children = _children(node)
        if children and depth >= config.max_depth:
            raise outputs.refuse(
                f"must not be nested deeper than {config.max_depth} levels (max_depth of the "
                "server's structured_outputs_config)",
                value=f"more than {depth} levels",
            )
        if size > config.max_size:
            raise outputs.refuse(
                f"must not have more than {config.max_size} bytes (max_size of the server's "
                "structured_outputs_config)",
                value="more",
            )
        stack.extend((child, depth + 1) for child in children)


def _num_bytes(node: Any) -> int:
    """Return about how many bytes of JSON a value has without its children."""
    return len(node.encode("utf-8", "replace")) + 2 if isinstance(node, str) else 2


def _children(node: Any) -> Collection[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list | tuple) else ()
