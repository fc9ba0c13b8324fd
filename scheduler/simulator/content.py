"""Block hashes of named content: what SHA-256 over tokens is in the engine, without any token.

A block's key covers all segments before it and the part of its own segment up to its end, so two
blocks have equal keys exactly if everything up to their ends is equal, as with real chain hashes.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from paged.scheduler.simulator.trace import Segment

ROOT = b""
"""Chain of the empty prefix."""

# Documents that come again find their keys here; bounded, as a trace may have any number.
_CACHED_SEGMENTS = 512


def block_hashes(segments: Iterable[Segment], block_size: int) -> list[bytes]:
    """Return one key per full block of the text that these segments make up, in order.

    A segment costs about a microsecond and a block a tenth of one.
    """
    hashes: list[bytes] = []
    chain = ROOT
    offset = 0
    for content, num_tokens in segments:
        hashes += _segment_hashes(chain, content, num_tokens, offset % block_size, block_size)
        chain = _extend(chain, content, num_tokens)
        offset += num_tokens
    return hashes


def _extend(chain: bytes, content: str | int, num_tokens: int) -> bytes:
    """Return the chain of a prefix that ends with these tokens of a content."""
    text = b"%b|%r|%d" % (chain, content, num_tokens)
    return hashlib.blake2b(text, digest_size=12).digest()


@lru_cache(maxsize=_CACHED_SEGMENTS)
def _segment_hashes(
    chain: bytes, content: str | int, num_tokens: int, lead: int, block_size: int
) -> tuple[bytes, ...]:
    """Return the keys of the blocks that end inside a segment.

    Args:
      chain: of all segments before it.
      content, num_tokens: the segment.
      lead: tokens of the unfinished block before it.
      block_size: tokens per block.
    """
    # The length is left out: a longer or shorter piece of the same content shares its blocks.
    base = _extend(chain, content, 0)
    ends = range(block_size - lead, num_tokens + 1, block_size)
    return tuple([base + end.to_bytes(4) for end in ends])
