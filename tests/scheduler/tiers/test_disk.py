"""The folder of blocks: found again, within its limit, and never wrong whatever the disk does."""

import errno
import logging
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.scheduler.tiers.block_file import file_bytes
from paged.scheduler.tiers.disk import DiskTier, make_namespace, make_offloading_directory
from tests.scheduler.tiers.fakes import content, name

KEYS = [name(number) for number in range(8)]
BLOCK_BYTES = 4096
FILE_BYTES = file_bytes(KEYS[0], BLOCK_BYTES)


def block_of(key: bytes) -> np.ndarray:
    return np.tile(content(key), BLOCK_BYTES // 32)


def open_tier(folder: Path, *, num_files: int = 100, namespace: str = "n", clock=time.monotonic):
    tier = DiskTier(
        folder,
        namespace=namespace,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=num_files * FILE_BYTES,
        clock=clock,
    )
    tier.scan()
    return tier


def store(tier: DiskTier, *keys: bytes) -> list[bool]:
    return [tier.store(key, block_of(key)) for key in keys]


def load(tier: DiskTier, key: bytes) -> bool:
    """Whether the block can be had; its bytes must be right."""
    entry = tier.pin(key)
    if entry is None:
        return False
    out = np.zeros(BLOCK_BYTES, np.uint8)
    loaded = tier.load(entry, out)
    tier.unpin(entry)
    assert not loaded or out.tobytes() == block_of(key).tobytes()
    return loaded


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_stored_block_is_read_back(tmp_path):
    tier = open_tier(tmp_path)
    assert store(tier, *KEYS[:3]) == [True] * 3
    assert [load(tier, key) for key in KEYS[:4]] == [True, True, True, False]
    assert (len(tier), tier.num_bytes, tier.num_stores) == (3, 3 * FILE_BYTES, 3)
    assert sum(path.stat().st_size for path in files(tmp_path)) == tier.num_bytes


def test_block_that_is_there_is_not_written_again(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, KEYS[0], KEYS[0])
    assert tier.num_stores == 1


def test_restart_finds_blocks_in_their_order_of_use(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, *KEYS[:4])
    for age, key in enumerate(reversed(KEYS[:4])):
        os.utime(tier.path(key), (1e9 - age, 1e9 - age))
    assert load(tier, KEYS[1])  # used now
    restarted = open_tier(tmp_path)
    assert restarted.keys() == [KEYS[0], KEYS[2], KEYS[3], KEYS[1]]
    assert all(load(restarted, key) for key in KEYS[:4])
    assert restarted.num_bytes == 4 * FILE_BYTES


def test_what_is_stored_before_the_scan_is_kept_as_newest(tmp_path):
    store(open_tier(tmp_path), *KEYS[:2])
    tier = DiskTier(tmp_path, namespace="n", block_bytes=BLOCK_BYTES, capacity_bytes=FILE_BYTES * 9)
    store(tier, KEYS[5], KEYS[0])
    tier.scan()
    assert tier.keys() == [KEYS[1], KEYS[5], KEYS[0]]
    assert tier.num_bytes == 3 * FILE_BYTES


def test_restart_with_a_lower_limit_deletes_the_oldest(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, *KEYS[:4])
    for age, key in enumerate(KEYS[:4]):
        os.utime(tier.path(key), (1e9 + age, 1e9 + age))
    assert open_tier(tmp_path, num_files=2).keys() == KEYS[2:4]
    assert len(files(tmp_path)) == 2


def test_scan_can_be_stopped(tmp_path):
    store(open_tier(tmp_path), *KEYS[:4])
    tier = DiskTier(tmp_path, namespace="n", block_bytes=BLOCK_BYTES, capacity_bytes=FILE_BYTES * 9)
    tier.scan(should_stop=lambda: True)
    assert len(tier) == 0
    assert len(files(tmp_path)) == 4


def test_limit_evicts_the_least_recently_used_and_deletes_its_file(tmp_path):
    tier = open_tier(tmp_path, num_files=3)
    store(tier, *KEYS[:3])
    tier.touch(KEYS[:2])  # head, tail
    store(tier, KEYS[3], KEYS[4])
    assert set(tier.keys()) == {KEYS[0], KEYS[3], KEYS[4]}
    assert len(files(tmp_path)) == 3


def test_pinned_file_is_not_evicted(tmp_path):
    tier = open_tier(tmp_path, num_files=1)
    store(tier, KEYS[0])
    entry = tier.pin(KEYS[0])
    assert store(tier, KEYS[1]) == [False]
    tier.unpin(entry)
    assert store(tier, KEYS[1]) == [True]
    assert tier.keys() == [KEYS[1]]


def test_other_namespace_is_not_seen(tmp_path):
    store(open_tier(tmp_path), KEYS[0])
    assert len(open_tier(tmp_path, namespace="other")) == 0


@pytest.mark.parametrize("field", ["model", "dtype", "block_size", "epoch"])
def test_namespace_depends_on_every_field(field: str):
    fields: dict[str, str | int] = {"model": "m", "dtype": "f", "block_size": 16, "epoch": 0}
    assert make_namespace(fields) == make_namespace(dict(reversed(fields.items())))
    assert make_namespace(fields) != make_namespace(fields | {field: "x"})


def test_cleared_tier_deletes_every_file_of_its_namespace(tmp_path):
    store(open_tier(tmp_path, namespace="other"), KEYS[0])
    store(open_tier(tmp_path), KEYS[7])
    tier = DiskTier(tmp_path, namespace="n", block_bytes=BLOCK_BYTES, capacity_bytes=FILE_BYTES * 9)
    store(tier, *KEYS[:2])
    tier.clear("next")
    assert len(tier) == 0
    tier.purge()
    assert [path.parts[-3] for path in files(tmp_path)] == ["other"]
    store(tier, KEYS[0])
    assert open_tier(tmp_path, namespace="next").keys() == [KEYS[0]]


def cut(path: str, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def flip(path: str, bit: int) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    Path(path).write_bytes(raw)


CORRUPTIONS = {
    "empty": lambda tier, path: cut(path, 0),
    "cut in the header": lambda tier, path: cut(path, 20),
    "cut in the key": lambda tier, path: cut(path, 40),
    "cut in the block": lambda tier, path: cut(path, FILE_BYTES - 1),
    "too long": lambda tier, path: cut(path, FILE_BYTES + 1),
    "zeros": lambda tier, path: Path(path).write_bytes(bytes(FILE_BYTES)),
    "another block": lambda tier, path: os.replace(tier.path(KEYS[1]), path),
    "vanished": lambda tier, path: os.unlink(path),
    "a folder": lambda tier, path: (os.unlink(path), os.mkdir(path)),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_broken_file_is_a_miss_a_warning_and_forgotten(tmp_path, caplog, kind: str):
    tier = open_tier(tmp_path)
    store(tier, *KEYS[:3])
    CORRUPTIONS[kind](tier, tier.path(KEYS[0]))
    assert not load(tier, KEYS[0])
    assert KEYS[0] not in tier
    assert tier.num_failures == 1
    assert len(caplog.records) == 1
    assert "KV offloading cannot read" in caplog.text
    assert load(tier, KEYS[2])
    if kind != "a folder":
        assert not os.path.exists(tier.path(KEYS[0]))
        assert store(tier, KEYS[0]) == [True], "a good file takes its place"
        assert load(tier, KEYS[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 * FILE_BYTES - 1))
def test_any_flipped_bit_is_noticed(tmp_path_factory, bit: int):
    tier = open_tier(tmp_path_factory.mktemp("flip"))
    store(tier, KEYS[0])
    flip(tier.path(KEYS[0]), bit)
    assert not load(tier, KEYS[0])


@pytest.mark.parametrize("bit", range(0, 8 * (28 + 32), 7))
def test_flipped_bit_of_header_or_key_is_noticed(tmp_path, bit: int):
    tier = open_tier(tmp_path)
    store(tier, KEYS[0])
    flip(tier.path(KEYS[0]), bit)
    assert not load(tier, KEYS[0])


def test_restart_skips_and_removes_files_of_a_wrong_size(tmp_path, caplog):
    tier = open_tier(tmp_path)
    store(tier, *KEYS[:2])
    cut(tier.path(KEYS[0]), 100)
    assert open_tier(tmp_path).keys() == [KEYS[1]]
    assert len(files(tmp_path)) == 1
    assert "its size is wrong" in caplog.text


def test_restart_removes_old_temporaries_and_leaves_other_files_alone(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, KEYS[0])
    folder = Path(tier.path(KEYS[0])).parent
    old, fresh, foreign, unnamed = (folder / n for n in ("a.tmp", "b.tmp", "notes.txt", "zz.kv"))
    for path in (old, fresh, foreign, unnamed):
        path.write_text("x")
        if path is not fresh:
            os.utime(path, (1, 1))
    assert open_tier(tmp_path).keys() == [KEYS[0]]
    assert not old.exists()
    assert fresh.exists()
    assert foreign.exists()
    assert unnamed.exists()


def test_full_disk_is_a_lost_save_and_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    tier = open_tier(tmp_path)
    store(tier, KEYS[0])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    assert store(tier, *KEYS[1:4]) == [False] * 3
    monkeypatch.undo()
    assert len(caplog.records) == 1, "one warning, not one a block"
    assert "No space left on device" in caplog.text
    assert tier.num_failures == 3
    assert len(files(tmp_path)) == 1
    assert store(tier, KEYS[1]) == [True], "works again when there is room"


def test_disk_that_fills_up_within_a_block_leaves_nothing_behind(tmp_path, caplog):
    tier = open_tier(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses the second half of the file, as a full disk would.
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, before[1]))
    try:
        assert store(tier, KEYS[0]) == [False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in caplog.text
    assert files(tmp_path) == []
    assert store(tier, KEYS[0]) == [True]


def test_warning_comes_back_after_a_minute_and_once_for_each_kind(tmp_path, caplog):
    now = [0.0]
    tier = open_tier(tmp_path, clock=lambda: now[0])
    store(tier, *KEYS)
    for seconds, key in zip((0, 30, 59, 61, 62), KEYS, strict=False):
        now[0] = seconds
        os.unlink(tier.path(key))
        load(tier, key)
    assert len(caplog.records) == 2
    cut(tier.path(KEYS[7]), 1)
    load(tier, KEYS[7])
    assert len(caplog.records) == 3


@pytest.mark.parametrize("action", ["scan", "store", "clear"])
def test_unusable_folder_raises_nothing(tmp_path, caplog, action: str):
    (tmp_path / "file").write_text("not a folder")
    tier = open_tier(tmp_path / "file")
    assert len(tier) == 0
    if action == "store":
        assert store(tier, KEYS[0]) == [False]
    if action == "clear":
        tier.clear()
        tier.purge()
    assert "Not a directory" in caplog.text


def test_folder_that_cannot_be_listed_is_skipped(tmp_path, monkeypatch, caplog):
    tier = open_tier(tmp_path)
    store(tier, *KEYS[:2])
    closed, scandir = os.path.dirname(tier.path(KEYS[0])), os.scandir

    def refuse(path: str):
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert open_tier(tmp_path).keys() == [KEYS[1]]
    assert "cannot list" in caplog.text


def test_file_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    tier = open_tier(tmp_path, num_files=1)
    store(tier, KEYS[0])

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    store(tier, KEYS[1])
    monkeypatch.undo()
    assert tier.keys() == [KEYS[1]]
    assert "cannot delete" in caplog.text


def test_read_only_folder_can_be_read(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    store(tier, KEYS[0])

    def refuse(_: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert load(tier, KEYS[0])
    assert tier.num_failures == 0


def test_two_processes_share_a_folder(tmp_path):
    one, two = open_tier(tmp_path), open_tier(tmp_path, num_files=2)
    store(one, *KEYS[:2])
    store(two, *KEYS[:2])
    assert len(files(tmp_path)) == 2
    store(two, KEYS[2])  # evicts a file that the other still knows
    assert sorted(load(one, key) for key in KEYS[:2]) == [False, True]


def test_warnings_come_from_this_module(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="paged.scheduler.tiers.disk"):
        tier = open_tier(tmp_path)
        store(tier, KEYS[0])
        os.unlink(tier.path(KEYS[0]))
        load(tier, KEYS[0])
    assert {record.name for record in caplog.records} == {"paged.scheduler.tiers.disk"}


def test_limit_that_holds_no_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"capacity_bytes=10 of disk holds no block of 4096 bytes"):
        DiskTier(tmp_path, namespace="n", block_bytes=BLOCK_BYTES, capacity_bytes=10)


def test_offloading_directory_is_made_or_refused(tmp_path):
    assert make_offloading_directory(str(tmp_path / "a" / "b")).is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"kv_offloading_path='.*file' cannot be written"):
        make_offloading_directory(str(tmp_path / "file"))
