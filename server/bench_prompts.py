"""Random prompts of given lengths: no two begin alike, so a prefix cache has nothing to give."""

import math
from collections.abc import Sequence

import numpy as np

# Short words that common vocabularies hold whole, so that a word is about one token.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
)  # fmt: skip


def random_lengths(
    rng: np.random.Generator, count: int, mean: int, range_ratio: float
) -> list[int]:
    """Return lengths drawn evenly from `mean` minus and plus its share `range_ratio`, at least 1.

    Source: vLLM `benchmarks/datasets.py`, RandomDataset.
    """
    low = max(1, math.floor(mean * (1 - range_ratio)))
    lengths: list[int] = rng.integers(low, longest(mean, range_ratio) + 1, count).tolist()
    return lengths


def longest(mean: int, range_ratio: float) -> int:
    """Return the greatest length that `random_lengths` can draw."""
    return math.ceil(mean * (1 + range_ratio))


def random_tokens(
    rng: np.random.Generator, lengths: Sequence[int], token_ids: Sequence[int] | np.ndarray
) -> list[list[int]]:
    """Return a prompt of each length, of ids drawn from `token_ids`."""
    ids = np.asarray(token_ids, np.int64)
    return [rng.choice(ids, length).tolist() for length in lengths]


def random_words(rng: np.random.Generator, lengths: Sequence[int]) -> list[str]:
    """Return a text of each length, in words."""
    return [" ".join(rng.choice(_WORDS, length).tolist()) for length in lengths]
