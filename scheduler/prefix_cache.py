"""Names of block contents: chained hashes, and which block holds which; knows no request queue.

A block's hash covers its parent's hash, its tokens and its extra keys, so it fingerprints the whole
prefix and a feature that changes keys and values (a salt, an adapter) needs one more extra key and
no special case.
"""

import hashlib
import importlib
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import cbor2

if TYPE_CHECKING:
    from paged.scheduler.request import Request


logger = logging.getLogger(__name__)

type ExtraKeys = tuple[tuple[str | int, ...], ...] | None
"""What else than tokens the keys and values of a block depend on, each entry tagged by its kind."""

HASH_ALGORITHMS = ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash")
DEFAULT_HASH_ALGORITHM = "sha256_cbor"

_SEED = "vllm-none-hash"


def _cbor(value: object) -> bytes:
    # Canonical CBOR: the same bytes in every process and language, unlike pickle or `hash`.
    return cbor2.dumps(value, canonical=True)


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


_SERIALIZERS: Mapping[str, Callable[[object], bytes]] = {
    "sha256_cbor": _cbor,
    "sha256": _pickle,
    "xxhash_cbor": _cbor,
    "xxhash": _pickle,
}


class PrefixHasher:
    """Hashes the full blocks of requests; everything that may share KV uses one of these.

    Args:
      algorithm: one of `HASH_ALGORITHMS`: digest and serialisation, named as in vLLM. The xxhash
        ones are fast and unsafe between tenants: who can craft a collision can read from or write
        into another one's prefix, so their root is random in every process.
      epoch: generation of the weights. It enters the root of every chain, so no block computed
        with earlier weights is ever found again; 0 leaves the root as vLLM has it.

    Raises: ValueError for an unknown algorithm, or if the package `xxhash` is missing.
    Source: vLLM `v1/core/kv_cache_utils.py`.
    """

    def __init__(self, algorithm: str = DEFAULT_HASH_ALGORITHM, *, epoch: int = 0) -> None:
        if algorithm not in HASH_ALGORITHMS:
            raise ValueError(
                f"hash algorithm {algorithm!r} is unknown; choose one of "
                f"{', '.join(HASH_ALGORITHMS)}."
            )
        self.algorithm = algorithm
        self.epoch = epoch
        self._serialize = _SERIALIZERS[algorithm]
        self._digest = _sha256 if algorithm.startswith("sha256") else _load_xxhash(algorithm)
        seed: object = _SEED
        if algorithm.startswith("xxhash"):
            seed = os.urandom(32).hex()
            logger.warning(
                "%s is not collision resistant: do not share this server between tenants, or use "
                "sha256_cbor.",
                algorithm,
            )
        self._seed = seed
        self.root = self._root()

    def _root(self) -> bytes:
        tagged = self._seed if self.epoch == 0 else (self._seed, "weights_epoch", self.epoch)
        return self._digest(self._serialize(tagged))

    def advance_epoch(self) -> None:
        """Make everything hashed so far unreachable, because the weights have changed."""
        self.epoch += 1
        self.root = self._root()

    def hash_block(
        self, parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys = None
    ) -> bytes:
        """Return the hash of a full block.

        Args:
          parent: hash of the block before it, `root` for the first.
          token_ids: the block's tokens, all of them.
          extra_keys: None, or tagged tuples such as `("cache_salt", salt)`; the tag keeps a salt
            and an adapter of the same name apart.
        """
        return self._digest(self._serialize((parent, tuple(token_ids), extra_keys)))

    def extend(self, request: "Request", block_size: int) -> None:
        """Append the hashes of the request's full blocks that have none yet.

        Costs 4 microseconds per new block and nothing otherwise. Only known tokens count, so that
        a front end may call this before it hands the request to the scheduler's thread.
        """
        hashes = request.block_hashes
        for index in range(len(hashes), request.num_tokens // block_size):
            parent = hashes[-1] if hashes else self.root
            start, stop = index * block_size, (index + 1) * block_size
            keys = extra_keys(request, start, stop)
            hashes.append(self.hash_block(parent, request.tokens(start, stop), keys))


def extra_keys(request: "Request", start: int, stop: int) -> ExtraKeys:
    """Return what tokens `start:stop` of a request depend on beside the tokens before them.

    The salt enters the first block only: the chain carries it to all later ones. An adapter is
    known by its name and by a digest of its content, so that loading other weights under an old
    name cannot reuse anything.
    """
    if request.cache_salt is None and request.lora is None and not request.mm_items:
        return None
    keys: list[tuple[str | int, ...]] = []
    if request.lora is not None:
        keys.append(("lora", *request.lora))
    keys += [
        ("mm", item.content_hash, item.offset - start)
        for item in request.mm_items
        if item.offset < stop and start < item.offset + item.length
    ]
    if start == 0 and request.cache_salt is not None:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _load_xxhash(algorithm: str) -> Callable[[bytes], bytes]:
    try:
        digest: Callable[[bytes], bytes] = importlib.import_module("xxhash").xxh3_128_digest
    except ImportError:
        raise ValueError(
            f"hash algorithm {algorithm!r} needs the package xxhash; install it, or use "
            f"{DEFAULT_HASH_ALGORITHM}."
        ) from None
    return digest


NONE_HASH = PrefixHasher().root
"""Parent of every first block: a fixed value, so equal prefixes hash equally in every process."""


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
