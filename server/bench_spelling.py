"""Named content spelt out: as token ids or as words, the same for the same name and seed."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paged.scheduler.simulator.trace import Segment
from paged.server.bench_prompts import random_tokens, random_words


class Speller[Prompt](Protocol):
    """Spells segments out, one after the other."""

    def spell(self, segments: Sequence[Segment]) -> Prompt:
        """Return the prompt that these segments make up."""
        ...


class TokenSpeller:
    """Content as token ids, drawn from `token_ids`."""

    def __init__(self, seed: int, token_ids: Sequence[int]) -> None:
        self._seed = seed
        self._token_ids = np.asarray(token_ids, np.int64)

    def spell(self, segments: Sequence[Segment]) -> list[int]:
        """Return as many ids as the segments have tokens."""
        ids: list[int] = []
        for name, length in segments:
            ids += random_tokens(_rng(self._seed, name), [length], self._token_ids)[0]
        return ids


class WordSpeller:
    """Content as words of about a token each, for APIs that take texts."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def spell(self, segments: Sequence[Segment]) -> str:
        """Return as many words as the segments have tokens."""
        return " ".join(
            random_words(_rng(self._seed, name), [length])[0] for name, length in segments
        )


def _rng(seed: int, name: str | int) -> np.random.Generator:
    """Return the generator of a content: another for every name and seed."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return np.random.default_rng([seed, int.from_bytes(digest)])
