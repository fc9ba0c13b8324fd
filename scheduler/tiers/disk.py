"""`DiskTier`: one file a block in a folder that later processes find again."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paged.scheduler.tiers import block_file
from paged.scheduler.tiers.block_file import CorruptBlockError, file_bytes
from paged.scheduler.tiers.figures import MediumStats, Transfers
from paged.scheduler.tiers.host import Block
from paged.scheduler.tiers.index import Entry, LruIndex

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_TEMPORARY_SUFFIX = ".tmp"
# Nobody takes an hour to write a block: what is older was left behind by a process that died.
_STALE_SECONDS = 3600.0
_WARNING_SECONDS = 60.0


def make_namespace(fields: Mapping[str, str | int]) -> str:
    """Return a folder's name that stands for everything that keys and values depend on.

    Args:
      fields: model and revision, dtype, block size, layout, parallelism, weights epoch, ... A key
        hashes tokens and not what computed them, so whatever changes keys and values, or how they
        lie in a block, belongs here. An epoch must be unique over all processes that share the
        folder: a digest of the weights, or a random number, not a counter from zero.
    """
    text = json.dumps(dict(fields), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_offloading_directory(directory: str) -> Path:
    """Create the folder of a disk tier if it is missing, and return it.

    For start-up, where a typing error should be heard of: a running tier only warns.

    Raises: ValueError if it cannot be created or written to.
    """
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"kv_offloading_path={str(path)!r} cannot be written ({error.strerror}); choose "
            "another folder with --kv-offloading-path."
        ) from None
    return path


class DiskTier:
    """Blocks as files, least recently used first out (mutable, thread-safe).

    What goes wrong on the disk is a miss and a warning (one a minute for each kind): a full disk,
    a cut, changed or vanished file, a folder that cannot be read. Several processes may share a
    folder, since a file appears whole or not at all; each sees the others' files when it starts.

    Nothing is read before `scan`. `store`, `scan` and `purge` belong to one thread.

    Args:
      folder: of all namespaces.
      namespace: folder of this model's blocks (`make_namespace`).
      block_bytes: of one block.
      capacity_bytes: most bytes of files, in this namespace.
      clock: seconds, monotonic.

    Raises: ValueError if not one block fits.
    """

    medium = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        namespace: str,
        block_bytes: int,
        capacity_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity_bytes < file_bytes(b"", block_bytes):
            raise ValueError(
                f"capacity_bytes={capacity_bytes} of disk holds no block of {block_bytes} bytes; "
                "raise it."
            )
        self.capacity_bytes = capacity_bytes
        self.block_bytes = block_bytes
        self.num_stores = 0
        self._failures: Counter[str] = Counter()
        self._reads, self._writes = Transfers(), Transfers()
        self._folder = folder
        self._root = folder / namespace
        self._clock = clock
        self._warned: dict[str, float] = {}
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._doomed: list[Path] = []
        # Unique, so that two processes (even in two containers, with one pid) never share a file.
        self._temporary = f".{uuid.uuid4().hex[:12]}{_TEMPORARY_SUFFIX}"

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @property
    def num_failures(self) -> int:
        """File operations that went wrong."""
        return self._failures.total()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are known."""
        return self._index.num_bytes

    def path(self, key: bytes) -> str:
        """Return where the block of this key lies, if it is there."""
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}{_SUFFIX}"

    def keys(self) -> list[bytes]:
        """Return all keys, next to be evicted first."""
        with self._lock:
            return self._index.keys()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these blocks of one prefix, in its order, the most recently used."""
        with self._lock:
            self._index.touch(keys)

    def pin(self, key: bytes) -> Entry | None:
        """Keep a block's file until `unpin`; None if it is not there."""
        with self._lock:
            entry = self._index.get(key)
            if entry is not None:
                entry.ref_count += 1
            return entry

    def unpin(self, entry: Entry) -> None:
        """Release a pinned block."""
        with self._lock:
            entry.ref_count -= 1

    def store(self, key: bytes, block: Block) -> bool:
        """Write a block's file, evicting others where the limit asks for it.

        Args:
          key: name of the content; if it is there, nothing happens.
          block: uint8 `[block_bytes]`.

        Returns: whether the block is there.
        """
        size = file_bytes(key, block.nbytes)
        if key in self._index:
            return True
        if not self._make_room(size):
            return False
        path = self.path(key)
        started = self._clock()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            block_file.write_block(path, path + self._temporary, key, block)
        except OSError as error:
            self._fail("write", path, error)
            return False
        with self._lock:
            self._index.add(Entry(key, size))
            self.num_stores += 1
            self._writes.add(1, self.block_bytes, self._clock() - started)
        return True

    def load(self, entry: Entry, out: Block) -> bool:
        """Read a pinned block into `out`, uint8 `[block_bytes]`.

        Returns: whether these are its bytes; if not, the block is forgotten and its file removed.
        """
        path = self.path(entry.key)
        started = self._clock()
        try:
            block_file.read_block(path, entry.key, out)
        except (OSError, CorruptBlockError) as error:
            # Deleted before it is forgotten: a new file of the same name must not be hit.
            if isinstance(error, CorruptBlockError):
                block_file.remove(path)
            with self._lock:
                self._index.remove(entry)
            self._fail("read", path, error)
            return False
        with self._lock:
            self._reads.add(1, self.block_bytes, self._clock() - started)
        with contextlib.suppress(OSError):  # a shared folder may be read-only
            os.utime(path)  # the order of use, for the next start
        return True

    def add_figures(self, stats: MediumStats) -> MediumStats:
        """Return `stats` with what only this tier knows."""
        with self._lock:
            return dataclasses.replace(
                stats,
                reads=self._reads.copy(),
                writes=self._writes.copy(),
                num_failed_reads=self._failures["read"],
                num_failed_writes=self._failures["write"],
            )

    def scan(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Find the blocks that earlier processes left, in the order of their last use.

        Removes what such a process did not finish writing, and what exceeds the limit.

        Args:
          should_stop: asked now and then; files found until then count.
        """
        found = []
        for file in self._files():
            if should_stop():
                break
            try:
                stat = file.stat()
            except OSError:
                continue  # another process has just deleted it
            name, suffix = os.path.splitext(file.name)
            if suffix == _TEMPORARY_SUFFIX and time.time() - stat.st_mtime > _STALE_SECONDS:
                block_file.remove(file.path)
            if suffix == _SUFFIX and (key := _key_of(name)) is not None:
                if stat.st_size == file_bytes(key, self.block_bytes):
                    found.append((stat.st_mtime_ns, key, stat.st_size))
                else:
                    self._fail("read", file.path, CorruptBlockError("its size is wrong"))
                    block_file.remove(file.path)
        with self._lock:
            known = self._index.entries()
            self._index.clear()
            for _, key, size in sorted(found):
                self._index.add(Entry(key, size))
            for entry in known:  # stored since the start, hence newer
                self._index.remove(self._index.get(entry.key) or entry)
                self._index.add(entry)
        self._make_room(0)

    def clear(self, namespace: str | None = None) -> None:
        """Forget every block; `purge` deletes the files, those not found yet included.

        Args:
          namespace: where later blocks go, for new weights; None stays.
        """
        with self._lock:
            self._doomed.append(self._root)
            self._index.clear()
            if namespace is not None:
                self._root = self._folder / namespace

    def purge(self) -> None:
        """Delete the folders that `clear` has given up."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
        for root in doomed:
            shutil.rmtree(root, onexc=self._on_rmtree_error)

    def _make_room(self, num_bytes: int) -> bool:
        victims = []
        with self._lock:
            while self._index.num_bytes + num_bytes > self.capacity_bytes:
                victim = self._index.victim()
                if victim is None:
                    break
                self._index.remove(victim)
                victims.append(self.path(victim.key))
            fits = self._index.num_bytes + num_bytes <= self.capacity_bytes
        for path in victims:
            if (error := block_file.remove(path)) is not None:
                self._fail("delete", path, error)
        return fits

    def _on_rmtree_error(self, _: object, path: str, error: BaseException) -> None:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self._fail("delete", path, error)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files in the folders of the namespace; what cannot be listed is skipped."""
        folders = [str(self._root)]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            yield entry
            except FileNotFoundError:
                continue  # a new namespace
            except OSError as error:
                self._fail("list", folder, error)

    def _fail(self, action: str, path: str, error: OSError | CorruptBlockError) -> None:
        """Count a failure, and say so unless the same has been said a moment ago."""
        self._failures[action] += 1
        kind = f"{action} {type(error).__name__} {getattr(error, 'errno', '')}"
        now = self._clock()
        if now - self._warned.get(kind, -_WARNING_SECONDS) >= _WARNING_SECONDS:
            self._warned[kind] = now
            logger.warning(
                "KV offloading cannot %s %s: %s. Such blocks are computed again; %d failures so "
                "far, and the next of this kind are not logged for a minute.",
                action,
                path,
                error,
                self.num_failures,
            )


def _key_of(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None
