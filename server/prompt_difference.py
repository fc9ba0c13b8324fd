"""`compare_prompts`: where two prompts part, which is where they stop sharing blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens shown before the first that differs.
_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """How far two prompts are the same.

    Attributes:
      num_equal: tokens at the start that both have.
      num_shared: of those, in whole blocks: what the second prompt takes from the cache.
      lengths: tokens of each.
      before: text of the last tokens before the difference.
      tokens: the first token of each that is not the other's; "" if it has ended.
    """

    num_equal: int
    num_shared: int
    lengths: tuple[int, int]
    before: str
    tokens: tuple[str, str]


def compare_prompts(
    first: Sequence[str], second: Sequence[str], block_size: int
) -> PromptDifference:
    """Return where two prompts part.

    Args:
      first, second: the texts of their tokens, in order.
      block_size: tokens of a block.
    """
    shorter = min(len(first), len(second))
    equal = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    # The last token of a prompt is always computed: its logits are wanted.
    reusable = min(equal, len(second) - 1)
    return PromptDifference(
        num_equal=equal,
        num_shared=max(0, reusable) // block_size * block_size,
        lengths=(len(first), len(second)),
        before="".join(first[max(0, equal - _CONTEXT) : equal]),
        tokens=("".join(first[equal : equal + 1]), "".join(second[equal : equal + 1])),
    )
