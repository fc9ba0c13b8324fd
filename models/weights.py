"""Checkpoint tensors to device arrays: the safetensors reader and `load_params`.

Tensors travel one by one, each cast on the way, so the host never holds the model: beyond the
weights themselves, loading needs about the memory of the largest tensor.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged.models.config import DTYPES, ModelConfig
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model, model_in_full
from paged.models.host_memory import drop_pages, to_device
from paged.models.json_file import read_json
from paged.models.quantization import QuantizedLayer, quantized_layers
from paged.models.quantized.quantizing import quantize_weight
from paged.models.registry import ARCHITECTURES
from paged.models.tensor_places import TensorPlace, match_tensors
from paged.models.tensor_source import TensorSource

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"

_SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}

type _Places = Mapping[Any, jax.sharding.Sharding]
"""Path of a parameter -> where it lies."""


class SafetensorsSource:
    """The tensors of a folder's safetensors files, memory-mapped.

    Reads `model.safetensors`, or the files that `model.safetensors.index.json` lists. Headers are
    checked against the file sizes here, so a damaged download fails before anything is loaded.

    Args:
      directory: folder of the checkpoint.
      file: name of the only file to be read; None: those of a model.

    Raises:
      CheckpointError: if a file is missing, cut short or no safetensors file.

    Source: https://huggingface.co/docs/safetensors (format).
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        self._entries: dict[str, _Entry] = {}
        self._last: _Entry | None = None
        folder = Path(directory)
        for path in _safetensors_files(folder) if file is None else [folder / file]:
            self._entries |= _read_header(path)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Return a read-only view of one tensor; bytes are read from the file when touched.

        Pages of the tensor before are dropped: it has been read, or is read from the file again.

        Raises:
          CheckpointError: if its element type is none that checkpoints are read in.
        """
        entry = self._entries[name]
        dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {name} in {entry.path} has element type {entry.dtype}; only "
                f"{', '.join(_SAFETENSORS_DTYPES)} can be read. Use another checkpoint."
            )
        if self._last is not None and self._last is not entry:
            drop_pages(self._last.data)
        self._last = entry
        values: np.ndarray = entry.data.view(dtype)
        return values.reshape(entry.shape)

    def close(self) -> None:
        """Let go of the files; views that `read` returned keep theirs mapped."""
        self._entries.clear()
        self._last = None


def resolve_dtype(requested: str, config: ModelConfig) -> str:
    """Return the element type of weights and activations: "bfloat16", "float16" or "float32".

    "auto" is the checkpoint's own type, except that a float32 checkpoint runs in bfloat16: half
    the memory and the traffic for no visible loss, and what vLLM does. Ask for "float32" to get it.

    Raises:
      ValueError: if `requested` is none of these.
    """
    if requested == "auto":
        return "bfloat16" if config.dtype == "float32" else config.dtype
    if requested not in DTYPES:
        raise ValueError(f"dtype={requested!r} is unknown; choose auto, {', '.join(DTYPES)}.")
    return requested


def load_params(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: str,
    quantization: str | None = None,
    shardings: Any = None,
    kv_head_copies: int = 1,
    progress: bool = True,
) -> nnx.State[Any, Any]:
    """Return the model's parameters, read from `source`, cast to `dtype`, and quantised.

    Args:
      config: shape of the model.
      source: where the tensors come from.
      dtype: element type of the parameters, see `resolve_dtype`.
      quantization: what the linear layers' weights are brought to, see `quantized_layers`.
      shardings: tree of shardings like the parameters', see `param_shardings`; None puts all on
        the first device. A device reads only its own slice.
      kv_head_copies: how often each kv head is there, one after the other (`TensorParallel`).
      progress: show a bar on standard error.

    Raises:
      CheckpointError: if tensors are missing, unexpected or of another shape; it lists them all.
    """
    arrange = ARCHITECTURES[config.architecture].arrange
    if arrange is not None:
        source = arrange(source)
    model = model_in_full(config, dtype=dtype)
    abstract = nnx.state(model)
    quantized = {layer.path: layer for layer in quantized_layers(model, quantization)}
    tensors = match_tensors(config, abstract, quantized, source)
    stored = replace(config, num_kv_heads=kv_head_copies * config.num_kv_heads)
    _, target = abstract_model(stored, dtype=dtype, quantization=quantization)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, target)
    leaves, wanted = nnx.to_flat_state(abstract), dict(nnx.to_flat_state(target))
    places = dict(zip(wanted, jax.tree.leaves(shardings), strict=True))
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in wanted.values())
    heads = _KvHeads(config.num_kv_heads, kv_head_copies)
    loaded: dict[Any, jax.Array] = {}
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for (path, leaf), place in zip(leaves, tensors, strict=True):
            layer = quantized.get(path)
            places_here = {at: where for at, where in places.items() if at[: len(path)] == path}
            # What is read must be gone before the next is.
            if layer is not None and layer.scheme is not None:
                arrays = _load_quantized(layer, place, source, wanted, places_here, heads)
            elif layer is not None:
                values = heads.repeat(place.read(source), leaf)
                arrays = _quantize(layer, values, leaf.dtype, places_here)
                del values
            else:
                values = heads.repeat(place.read(source), leaf)
                arrays = {path: to_device(values, leaf.dtype, places[path])}
                del values
            loaded |= arrays
            bar.update(sum(array.nbytes for array in arrays.values()))
            del arrays
    params: nnx.State[Any, Any] = jax.tree.unflatten(
        jax.tree.structure(target), [loaded[path] for path in wanted]
    )
    return params


def _quantize(
    layer: QuantizedLayer, values: np.ndarray, dtype: np.dtype, places: _Places
) -> dict[Any, jax.Array]:
    """Return the parts of a weight that is quantised on the device, by their paths."""
    shardings = {path[-1]: place for path, place in places.items()}
    parts = quantize_weight(layer.form, layer.num_output_axes, values, dtype, shardings)
    return {(*layer.path, part): value for part, value in parts.items()}


def _load_quantized(
    layer: QuantizedLayer,
    place: TensorPlace,
    source: TensorSource,
    wanted: dict[Any, Any],
    places: _Places,
    heads: "_KvHeads",
) -> dict[Any, jax.Array]:
    """Return the parts of a weight that the checkpoint has in fewer bits, by their paths."""
    parts = place.read_quantized(source, layer)
    arrays = {}
    for path, where in places.items():
        leaf = wanted[path]
        values = heads.repeat(parts[path[-1]].reshape(heads.stored_shape(leaf)), leaf)
        arrays[path] = to_device(values, leaf.dtype, where)
    return arrays


@dataclass(frozen=True, slots=True)
class _KvHeads:
    """How many kv heads a checkpoint has, and how often each is wanted, one after the other."""

    number: int
    copies: int

    def stored_shape(self, leaf: Any) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a parameter that is wanted with all copies."""
        axis = self._axis(leaf)
        return tuple(n // self.copies if i == axis else n for i, n in enumerate(leaf.shape))

    def repeat(self, values: np.ndarray, leaf: Any) -> np.ndarray:
        """Return a parameter's values with the copies; its axis of heads may hold their features,
        too."""
        axis = self._axis(leaf)
        if axis is None or self.copies == 1:
            return values
        before, after = values.shape[:axis], values.shape[axis + 1 :]
        by_head = np.repeat(values.reshape(*before, self.number, -1, *after), self.copies, axis)
        return by_head.reshape(*before, -1, *after)

    def _axis(self, leaf: Any) -> int | None:
        axes: tuple[str | None, ...] = leaf.get_metadata("out_sharding")
        return axes.index("kv_heads") if "kv_heads" in axes else None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a safetensors file; `data` is its bytes, uint8 `[num_bytes]`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / SAFETENSORS_INDEX
    if not index.is_file():
        path = directory / SAFETENSORS_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has neither {SAFETENSORS_FILE} nor {SAFETENSORS_INDEX}; "
                "pass the folder of a checkpoint in safetensors format."
            )
        return [path]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: holds no weight_map; fetch the checkpoint again.")
    # Files beside the index only: it must not point out of its folder.
    present = {path.name for path in directory.iterdir() if path.is_file()}
    names = sorted(set(map(str, weight_map.values())))
    if absent := [name for name in names if name not in present]:
        raise CheckpointError(
            f"{directory} lacks {', '.join(absent)}, which {SAFETENSORS_INDEX} lists; "
            "fetch the checkpoint again."
        )
    return [directory / name for name in names]


def _read_header(path: Path) -> dict[str, _Entry]:
    """Return the entries of one file: 8 bytes of header length, a JSON header, then the data."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > file_bytes - 8:
            raise CheckpointError(
                f"{path}: no safetensors file, or cut short within its header; "
                "fetch the checkpoint again (with Git LFS installed, if it comes from git)."
            )
        header = file.read(header_bytes)
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)[8 + header_bytes :]
    try:
        fields = json.loads(header)
        fields.pop("__metadata__", None)
        entries = {name: _entry(path, data, field) for name, field in fields.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged header ({error!r}); fetch the checkpoint again."
        ) from None
    promised = max((field["data_offsets"][1] for field in fields.values()), default=0)
    if promised != len(data):
        raise CheckpointError(
            f"{path}: its header promises {promised} bytes of tensors, the file holds {len(data)}; "
            "fetch the checkpoint again."
        )
    return entries


def _entry(path: Path, data: np.ndarray, field: Mapping[str, Any]) -> _Entry:
    start, end = field["data_offsets"]
    shape, dtype = tuple(map(int, field["shape"])), str(field["dtype"])
    known = _SAFETENSORS_DTYPES.get(dtype)
    if start < 0 or end < start or any(size < 0 for size in shape):
        raise ValueError(f"offsets {start}:{end}, shape {list(shape)}")
    if known is not None and end - start != math.prod(shape) * known.itemsize:
        raise ValueError(f"{end - start} bytes for {dtype} {list(shape)}")
    return _Entry(path, dtype, shape, data[start:end])
