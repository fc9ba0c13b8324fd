"""Names of block contents: chained hashes, and which block holds which; knows no request queue.

A block's hash covers its parent's hash, its tokens and its extra keys, so it fingerprints the whole
prefix and a feature that changes keys and values (a salt, an adapter) needs one more extra key and
no special case.
"""

import hashlib
from collections.abc import Sequence

import cbor2

from paged.scheduler.request import Request

type ExtraKeys = tuple[tuple[str | int, ...], ...] | None
"""What else than tokens the keys and values of a block depend on, each entry tagged by its kind."""


def _digest(value: object) -> bytes:
    # Canonical CBOR: the same bytes in every process and language, unlike pickle or `hash`.
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


NONE_HASH = _digest("vllm-none-hash")
"""Parent of every first block: a fixed value, so equal prefixes hash equally in every process."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys) -> bytes:
    """Return the 32-byte hash of a full block.

    Args:
      parent: hash of the block before it, `NONE_HASH` for the first.
      token_ids: the block's tokens, all of them.
      extra_keys: None, or tagged tuples such as `("cache_salt", salt)`; the tag keeps a salt and
        an adapter of the same name apart.

    Source: vLLM `hash_block_tokens` with `sha256_cbor`.
    """
    return _digest((parent, tuple(token_ids), extra_keys))


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Append the hashes of the request's full blocks that have none yet.

    Costs 4 microseconds per new block and nothing otherwise. Only known tokens count, so that a
    front end may call this before it hands the request to the scheduler's thread.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), request.num_tokens // block_size):
        parent = hashes[-1] if hashes else NONE_HASH
        token_ids = request.tokens(index * block_size, (index + 1) * block_size)
        hashes.append(hash_block(parent, token_ids, _extra_keys(request, index)))


def _extra_keys(request: Request, index: int) -> ExtraKeys:
    # The salt enters the first block only: the chain carries it to all later ones.
    if index == 0 and request.cache_salt is not None:
        return (("cache_salt", request.cache_salt),)
    return None


class HashIndex:
    """Which blocks hold the content of a hash (mutable).

    Two requests may compute equal blocks, and neither block table may change under its owner, so
    duplicates are kept and the first one answers.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        # The bare int is the common case: one object less per cached block.
        self._blocks: dict[bytes, int | dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def get(self, block_hash: bytes) -> int | None:
        """Return the first block inserted under this hash, None if there is none."""
        found = self._blocks.get(block_hash)
        return next(iter(found)) if isinstance(found, dict) else found

    def all(self, block_hash: bytes) -> list[int]:
        """Return the blocks under this hash in order of insertion."""
        found = self._blocks.get(block_hash)
        if found is None:
            return []
        return list(found) if isinstance(found, dict) else [found]

    def count(self, block_hash: bytes) -> int:
        """Return how many blocks there are under this hash."""
        found = self._blocks.get(block_hash)
        if found is None:
            return 0
        return len(found) if isinstance(found, dict) else 1

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Add a block that holds this content."""
        found = self._blocks.get(block_hash)
        if found is None:
            self._blocks[block_hash] = block_id
        elif isinstance(found, dict):
            found[block_id] = None
        else:
            self._blocks[block_hash] = {found: None, block_id: None}

    def remove(self, block_hash: bytes, block_id: int) -> None:
        """Forget that this block holds this content."""
        found = self._blocks[block_hash]
        if not isinstance(found, dict):
            del self._blocks[block_hash]
            return
        del found[block_id]
        if not found:
            del self._blocks[block_hash]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
