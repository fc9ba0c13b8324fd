"""Prompts from a JSON Lines file: texts or chats, one object a line.

    {"prompt": "What is the capital of India?", "output_tokens": 10}
    {"messages": [{"role": "user", "content": "And of Iran?"}]}

Source: vLLM `benchmarks/datasets`, CustomDataset, for `prompt` and `output_tokens`.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One line: a text or the messages of a chat, and the most tokens to generate."""

    content: str | Sequence[Mapping[str, Any]]
    output_len: int


def read_prompts(path: pathlib.Path, output_len: int) -> list[FilePrompt]:
    """Return the prompts of a file, in its order.

    Args:
      path: of the file.
      output_len: for lines that name no `output_tokens`; -1 means that every line has to.

    Raises: ValueError that names file, line and field; OSError if it cannot be read.
    """
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    prompts.append(_prompt(json.loads(line), output_len))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} is empty; write one JSON object with a prompt a line.")
    return prompts


def _prompt(fields: Any, output_len: int) -> FilePrompt:
    if not isinstance(fields, dict):
        raise ValueError('is no JSON object; write {"prompt": "..."}.')
    content = fields.get("prompt", fields.get("messages"))
    is_chat = isinstance(content, list) and all(
        isinstance(message, dict) and "role" in message for message in content
    )
    if not content or not (isinstance(content, str) or is_chat):
        raise ValueError(
            '"prompt" must be a text that is not empty, or "messages" a list of chat messages.'
        )
    wanted = fields.get("output_tokens", output_len)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ValueError(
            f'"output_tokens" is {wanted!r}; give a number of at least 1 here, or '
            "--custom-output-len for lines without it."
        )
    return FilePrompt(content, wanted)
