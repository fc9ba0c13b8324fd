"""Comparison with the golden texts, near ties excepted."""

from collections.abc import Sequence
from typing import Any


def check_greedy(name: str, got: Sequence[int], steps: Sequence[dict[str, Any]]) -> int:
    """Assert that `got` follows the golden steps; return how many were compared.

    After a different choice at a step marked `near_tie` the rest is another text, so comparison
    ends there.
    """
    for number, (token_id, step) in enumerate(zip(got, steps, strict=True)):
        if token_id == step["id"]:
            continue
        assert step.get("near_tie"), (
            f"{name}: step {number} gave {token_id}, golden {step['id']} "
            f"with a gap of {step['gap']}"
        )
        return number
    return len(steps)


def prompt_ids(prompt: dict[str, Any]) -> list[int]:
    """Return the ids the golden run was given."""
    return prompt["ids"] or prompt["ids_no_special"]
