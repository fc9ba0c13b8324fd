"""Checkpoint tensors to device arrays: the safetensors reader and `load_params`.

Tensors travel one by one, each cast on the way, so the host never holds the model: beyond the
weights themselves, loading needs about the memory of the largest tensor.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged.models.config import DTYPES, ModelConfig
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model
from paged.models.json_file import read_json
from paged.models.registry import ARCHITECTURES, WeightRule
from paged.models.stored_weight import QUANTIZATIONS

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"

_SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
}
# Buffers that old checkpoints store and that follow from the config.
_IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class TensorSource(Protocol):
    """Named tensors of a checkpoint, under Hugging Face names and in that layout."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""

    def read(self, name: str) -> np.ndarray:
        """Return one tensor: a read-only view of a file, or a writable array for the caller."""

    def close(self) -> None:
        """Let go of the files; nothing can be read any more."""


class SafetensorsSource:
    """The tensors of a folder's safetensors files, memory-mapped.

    Reads `model.safetensors`, or the files that `model.safetensors.index.json` lists. Headers are
    checked against the file sizes here, so a damaged download fails before anything is loaded.

    Args:
      directory: folder of the checkpoint.

    Raises:
      CheckpointError: if a file is missing, cut short or no safetensors file.

    Source: https://huggingface.co/docs/safetensors (format).
    """

    def __init__(self, directory: str | Path) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in _safetensors_files(Path(directory)):
            self._entries |= _read_header(path)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Return a read-only view of one tensor; bytes are read from the file when touched.

        Raises:
          CheckpointError: if its element type is not F32, F16, BF16 or U8.
        """
        entry = self._entries[name]
        dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {name} in {entry.path} has element type {entry.dtype}; only "
                f"{', '.join(_SAFETENSORS_DTYPES)} can be read. Use an unquantized checkpoint."
            )
        values: np.ndarray = entry.data.view(dtype)
        return values.reshape(entry.shape)

    def close(self) -> None:
        """Let go of the files; views that `read` returned keep theirs mapped."""
        self._entries.clear()


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
      quantization: format of the linear layers' weights, see `quantize_layers`.
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
    _, abstract = abstract_model(config, dtype=dtype)
    tensors = _match_tensors(config, abstract, source)
    stored = dataclasses.replace(config, num_kv_heads=kv_head_copies * config.num_kv_heads)
    _, target = abstract_model(stored, dtype=dtype, quantization=quantization)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, target)
    leaves, wanted = nnx.to_flat_state(abstract), dict(nnx.to_flat_state(target))
    places = dict(zip(wanted, jax.tree.leaves(shardings), strict=True))
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in leaves)
    loaded: dict[Any, jax.Array] = {}
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for (path, leaf), tensor in zip(leaves, tensors, strict=True):
            is_quantized = path not in wanted
            place = places[(*path, "values") if is_quantized else path]
            # The tensor gets no name here: it must be gone before the next one is read.
            array = _to_device(
                _repeat_kv_heads(tensor.read(source), leaf, kv_head_copies), leaf.dtype, place
            )
            bar.update(array.nbytes)
            if is_quantized and quantization is not None:
                num_output_axes = len(wanted[*path, "scales"].shape)
                shardings_of = tuple((part, places[*path, part]) for part in ("values", "scales"))
                parts = _quantizer(quantization, num_output_axes, shardings_of)(array)
                jax.block_until_ready(parts)  # type: ignore[no-untyped-call]
                array.delete()
                loaded |= {(*path, part): value for part, value in parts.items()}
            else:
                loaded[path] = array
    params: nnx.State[Any, Any] = jax.tree.unflatten(
        jax.tree.structure(target), [loaded[path] for path in wanted]
    )
    return params


@functools.lru_cache
def _quantizer(
    quantization: str,
    num_output_axes: int,
    shardings: tuple[tuple[str, jax.sharding.Sharding], ...],
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Return the compiled function from a weight to its parts; kept, as weights share shapes."""
    quantize = functools.partial(
        QUANTIZATIONS[quantization].quantize, num_output_axes=num_output_axes
    )
    return jax.jit(quantize, out_shardings=dict(shardings))


def _repeat_kv_heads(values: np.ndarray, leaf: Any, copies: int) -> np.ndarray:
    axes = leaf.get_metadata("out_sharding")
    if copies == 1 or "kv_heads" not in axes:
        return values
    return np.repeat(values, copies, axis=axes.index("kv_heads"))


def _to_device(values: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    def device_slice(index: tuple[slice, ...] | None) -> np.ndarray:
        part = values[index]
        # On a CPU, JAX may keep a NumPy buffer instead of copying it. Weights must not be views of
        # a file: it could be replaced under them.
        is_private = part.flags.writeable and part.dtype == dtype
        return part if is_private else np.array(part, dtype)

    array = jax.make_array_from_callback(values.shape, sharding, device_slice)
    # Waited for, or the buffers of many tensors would be in flight at once.
    jax.block_until_ready(array)  # type: ignore[no-untyped-call]
    return array


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies: a range of a tensor's first axis; `stop` is None for all of it."""

    name: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None

    def read(self, source: TensorSource) -> np.ndarray:
        """Return the parameter's values, in its shape."""
        values = source.read(self.name)
        part = values if self.stop is None else values[self.start : self.stop]
        return part.reshape(self.shape)


def _match_tensors(
    config: ModelConfig, abstract: nnx.State[Any, Any], source: TensorSource
) -> list[_Place]:
    """Return the place of each parameter, in flattening order, or list all that does not fit."""
    rules = {rule.path: rule for rule in ARCHITECTURES[config.architecture].weight_rules}
    order = {path: number for number, path in enumerate(rules)}
    # The parameters of each tensor, in the order of their rules: number, shape, shape stored as.
    tensors: dict[str, list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = {}
    leaves = nnx.to_flat_state(abstract)
    for number, (path, leaf) in enumerate(leaves):
        layer = next((str(key) for key in path if isinstance(key, int)), "")
        rule = rules[".".join("*" if isinstance(key, int) else str(key) for key in path)]
        members = tensors.setdefault(rule.name.replace("*", layer), [])
        stored = _checkpoint_shape(leaf.shape, rule)
        members.append((order[rule.path], number, leaf.shape, stored))
    available = set(source.names())
    missing, misshaped = [], []
    places: dict[int, _Place] = {}
    for name, members in tensors.items():
        start = 0
        for _, number, shape, stored in sorted(members):
            stop = None if len(members) == 1 else start + stored[0]
            places[number] = _Place(name, shape, start, stop)
            start += stored[0]
        expected = (start, *members[0][3][1:])
        if name not in available:
            missing.append(name)
        elif (actual := source.shape(name)) != expected:
            misshaped.append(f"{name} {list(actual)} instead of {list(expected)}")
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unexpected = sorted(
        name for name in available - set(tensors) - ignored if not _IGNORED.search(name)
    )
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    if any(problems.values()):
        listed = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
        raise CheckpointError(
            f"the checkpoint's tensors do not fit its config ({config.architecture}); "
            f"{'; '.join(listed)}. Fetch the checkpoint again, or correct the config."
        )
    return [places[number] for number in range(len(leaves))]


def _checkpoint_shape(shape: tuple[int, ...], rule: WeightRule) -> tuple[int, ...]:
    axis = rule.heads_axis
    if axis is None:
        return shape
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


@dataclasses.dataclass(frozen=True, slots=True)
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
