"""From a request's fields to the constraint of its output."""

import dataclasses
from typing import Any

import msgspec

from paged.scheduler.structured.params import KINDS, StructuredOutputs
from paged.server.errors import ApiError
from paged.server.protocol import GenerationRequest

# Field of older clients -> what it is called now.
_LEGACY = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_FORMAT, _PARAMS = "response_format", "structured_outputs"
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(request: GenerationRequest) -> StructuredOutputs | None:
    """Return what the request's output must look like, None if it says nothing about it.

    Of `response_format`, `structured_outputs` and the `guided_` fields one may be given; the
    format "text" is as good as none. Only `structured_outputs` of the format's own kind, or of
    none, may stand beside a format: the format is what counts, with their options.

    Raises: ApiError or ParameterError naming the field that is wrong.
    """
    legacy = [name for name in _LEGACY if getattr(request, name) is not None]
    given = [
        *([_FORMAT] if _asks_for_format(request) else []),
        *([_PARAMS] if request.structured_outputs is not None else []),
        *legacy,
    ]
    if not given:
        return None
    if given == [_FORMAT, _PARAMS]:
        return _with_options(request)
    if len(given) > 1:
        raise ApiError(f"Send one of {' and '.join(given)}, not both.", param=given[1])
    if legacy:
        return StructuredOutputs(
            **{_LEGACY[legacy[0]]: getattr(request, legacy[0])}, source=legacy[0]
        )
    if request.structured_outputs is not None:
        return StructuredOutputs(**msgspec.structs.asdict(request.structured_outputs))
    assert request.response_format is not None
    return _of_format(request.response_format)


def _with_options(request: GenerationRequest) -> StructuredOutputs:
    """Return the format, with the options of the parameters beside it."""
    assert request.response_format is not None
    assert request.structured_outputs is not None
    wanted = _of_format(request.response_format)
    fields = msgspec.structs.asdict(request.structured_outputs)
    if any(fields.pop(kind) is not None for kind in KINDS if kind != wanted.kind):
        raise ApiError(f"Send one of {_FORMAT} and {_PARAMS}, not both.", param=_PARAMS)
    del fields[wanted.kind]
    return dataclasses.replace(wanted, **fields)


def _asks_for_format(request: GenerationRequest) -> bool:
    if request.response_format is None:
        return False
    kind = request.response_format.get("type")
    if kind not in _FORMATS:
        raise ApiError(
            f"{_FORMAT} must be an object whose `type` is one of {', '.join(_FORMATS)}.",
            param=_FORMAT,
        )
    return bool(kind != "text")


def _of_format(response_format: dict[str, Any]) -> StructuredOutputs:
    kind = response_format["type"]
    if kind == "json_object":
        return StructuredOutputs(json_object=True, source=_FORMAT)
    if kind == "structural_tag":
        tag = {name: value for name, value in response_format.items() if name != "type"}
        return StructuredOutputs(structural_tag=tag, source=_FORMAT)
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict | bool):
        raise ApiError(
            f'{_FORMAT} of type json_schema must have `json_schema`: {{"name": ..., "schema": '
            "{...}}.",
            param=f"{_FORMAT}.json_schema",
        )
    return StructuredOutputs(json=schema, source=_FORMAT)
