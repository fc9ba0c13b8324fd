"""The constraint of an answer that follows on reasoning."""

import dataclasses
import json
from collections.abc import Sequence

from paged.scheduler.structured.params import StructuredOutputs
from paged.server.errors import ApiError


def after_reasoning(outputs: StructuredOutputs, rules: Sequence[str]) -> StructuredOutputs:
    """Return the constraint with free reasoning in front of what it says.

    Args:
      outputs: of the answer.
      rules: of the reasoning; the first is `prefix`.

    Raises: ApiError for a kind of constraint that cannot be part of another one.
    """
    if outputs.json is not None or outputs.json_object:
        schema = {"type": "object"} if outputs.json is None else outputs.json
        return dataclasses.replace(
            outputs,
            json=None,
            json_object=None,
            grammar="\n".join(["start: prefix answer", *rules]) + "\n",
            schemas={"answer": schema},
            spaces_json=True,
            source=outputs.field_of(outputs.kind),
        )
    if outputs.choice is not None:
        body = " | ".join(json.dumps(text, ensure_ascii=False) for text in outputs.choice)
    elif outputs.regex is not None:
        body = "ANSWER"
        rules = [*rules, f"ANSWER: /{_slashes_escaped(outputs.regex)}/"]
    else:
        raise ApiError(
            "A grammar or structural tag cannot follow on reasoning; turn that off, with "
            'chat_template_kwargs {"enable_thinking": false} where the model knows it, or make '
            "the reasoning part of the grammar.",
            param=outputs.source,
        )
    text = "\n".join(["start: prefix answer", *rules, f"answer: {body}"]) + "\n"
    return StructuredOutputs(grammar=text, source=outputs.field_of(outputs.kind))


def _slashes_escaped(pattern: str) -> str:
    r"""Return a pattern whose slashes cannot end it: "/" becomes "\/", what is escaped stays."""
    result, is_escaped = "", False
    for character in pattern:
        result += "\\/" if character == "/" and not is_escaped else character
        is_escaped = character == "\\" and not is_escaped
    return result.replace("\n", "\\n")
