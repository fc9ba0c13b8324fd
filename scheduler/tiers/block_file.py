"""One block as a file: a header that names and checks it, its key, its bytes.

Little-endian: magic (8 bytes), version (u32), key bytes (u32), block bytes (u64), CRC-32 of key and
block (u32); then the key and the block. Every bit of the file is covered by a comparison.

The checksum is `zlib.crc32`, the fastest of the standard library by far (docs/decisions/0014). A
hash would guard against forgery, but whoever may write to the folder could forge that too.
"""

import os
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

MAGIC = b"pagedkv\n"
VERSION = 1

_HEADER = struct.Struct("<8sIIQI")


class CorruptBlockError(Exception):
    """The file is not what its name says."""


def file_bytes(key: bytes, block_bytes: int) -> int:
    """Return the size of the file of one block."""
    return _HEADER.size + len(key) + block_bytes


def write_block(path: str, temporary: str, key: bytes, block: NDArray[np.uint8]) -> None:
    """Write a block so that `path` is there whole or not at all.

    Not synced to the disk: after a loss of power the checksum finds what was not written.

    Args:
      path: of the file.
      temporary: of a name in the same folder that nobody else uses; gone afterwards.
      key: name of the content.
      block: uint8 `[block_bytes]`.

    Raises: OSError.
    """
    checksum = zlib.crc32(block, zlib.crc32(key))
    header = _HEADER.pack(MAGIC, VERSION, len(key), block.nbytes, checksum)
    try:
        with open(temporary, "wb") as file:
            file.write(header + key)
            file.write(block.data)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def read_block(path: str, key: bytes, out: NDArray[np.uint8]) -> None:
    """Read the block named `key` into `out`, uint8 `[block_bytes]`; undefined after an error.

    Raises:
      OSError: the file cannot be read.
      CorruptBlockError: it is cut, too long, another block's, or its bytes have changed.
    """
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        stored_key = file.read(len(key))
        num_read = file.readinto(out.data)
        surplus = file.read(1)
    if len(header) < _HEADER.size or num_read < out.nbytes or surplus:
        raise CorruptBlockError("its size is wrong")
    magic, version, key_bytes, block_bytes, checksum = _HEADER.unpack(header)
    if (magic, version) != (MAGIC, VERSION):
        raise CorruptBlockError("it is of another format or version")
    if (key_bytes, block_bytes, stored_key) != (len(key), out.nbytes, key):
        raise CorruptBlockError("it is another block's")
    if zlib.crc32(out, zlib.crc32(key)) != checksum:
        raise CorruptBlockError("its checksum is wrong")


def remove(path: str) -> OSError | None:
    """Delete a file; return why that failed. One that is not there counts as deleted."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
