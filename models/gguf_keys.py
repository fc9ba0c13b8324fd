"""`Keys`: the metadata of a GGUF file under the prefix of its architecture."""

from typing import Any

from paged.models.errors import CheckpointError, UnsupportedModelError
from paged.models.gguf_file import GGUFFile


class Keys:
    """Metadata under the architecture's prefix; per-layer lists must repeat one value."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise CheckpointError(
                f"{self._file.path}: its metadata lacks {self._architecture}.{key}; "
                "convert the checkpoint again or pass another file."
            )
        return value

    def count(self, key: str) -> int:
        """Return a positive integer; raises `CheckpointError` if it is none, or absent."""
        value = self[key]
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._file.path}: {self._architecture}.{key}={value!r} must be a positive "
                "integer; the file is damaged, fetch it again."
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; raises `UnsupportedModelError` if layers have different ones."""
        name = f"{self._architecture}.{key}"
        value = self._file.metadata.get(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self._file.path}: {name} differs from layer to layer, which is not "
                    "supported."
                )
            return value[0]
        return value
