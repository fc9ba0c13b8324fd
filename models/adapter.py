"""`read_adapter`: a LoRA adapter's files to matrices for the layers of one model."""

import hashlib
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from paged.models.adapter_config import AdapterConfig
from paged.models.checkpoint import HUB_ID, fetch_folder
from paged.models.errors import (
    AdapterMismatchError,
    AdapterNotFoundError,
    CheckpointError,
    UnsupportedAdapterError,
)
from paged.models.json_file import read_json
from paged.models.lora_layers import AdaptableModel, LoRALayer
from paged.models.text_part import TEXT_PARTS, language_name
from paged.models.weights import SafetensorsSource

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """What an adapter has for one layer.

    Attributes:
      a: `[rank, *input axes]`.
      b: `[rank, *output axes]`, times the factor.
    """

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory.

    Attributes:
      layers: by the path of the layer in the model; those it does not change are left out.
      digest: of all that is in `layers`, so equal digests are equal adapters.
    """

    layers: Mapping[str, AdapterMatrices]
    digest: str


def read_adapter(path: str, model: AdaptableModel, *, max_rank: int, dtype: str) -> HostAdapter:
    """Read and check an adapter in PEFT's format.

    Args:
      path: folder of the adapter, or the id of its repository on the Hub.
      model: what it may change.
      max_rank: largest rank that there is room for.
      dtype: element type of the matrices.

    Raises:
      AdapterNotFoundError: if files are missing or damaged.
      AdapterMismatchError: if they change modules that the model has not, or of other shapes.
      UnsupportedAdapterError: if something of it is not implemented, or has no room.
    """
    folder = _folder(path)
    try:
        config = AdapterConfig.from_json(read_json(folder / CONFIG_FILE))
        source = SafetensorsSource(folder, WEIGHTS_FILE)
        matrices = _modules(path, config, {name: source.read(name) for name in source.names()})
    except CheckpointError as error:
        raise AdapterNotFoundError(f"LoRA adapter {path}: {error}") from None
    if model.architecture in TEXT_PARTS:
        matrices = {language_name(module): pair for module, pair in matrices.items()}
    known = _checked_modules(path, model, list(matrices))
    layers: dict[str, AdapterMatrices] = {}
    for module, (a, b) in matrices.items():
        rank = config.rank_of(module)
        _check_shapes(path, known[module], a, b, rank)
        if rank > max_rank:
            raise UnsupportedAdapterError(
                f"LoRA adapter {path} has rank {rank} at {module}, more than max_lora_rank="
                f"{max_rank}; raise it (--max-lora-rank)."
            )
        factor = config.factor_of(module)
        layers |= {layer.path: _matrices(layer, a, b, factor, dtype) for layer in known[module]}
    return HostAdapter(layers, _digest(layers))


def _folder(path: str) -> Path:
    folder = Path(os.path.expanduser(path))
    try:
        if not folder.exists() and HUB_ID.fullmatch(path):
            folder = fetch_folder(path, [CONFIG_FILE, WEIGHTS_FILE])
    except CheckpointError as error:
        raise AdapterNotFoundError(f"LoRA adapter {path}: {error}") from error
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise AdapterNotFoundError(
                f"LoRA adapter {path} has no {name}; pass a folder that PEFT's save_pretrained "
                "wrote, in safetensors format."
            )
    return folder


def _modules(
    path: str, config: AdapterConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A and B of each module that the file names."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, values in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], {})[match[2]] = values
        elif not _is_ignored(name, config):
            raise UnsupportedAdapterError(
                f"LoRA adapter {path}: tensor {name} is neither lora_A nor lora_B of a linear "
                "layer; such changes are not implemented. Train without them, or merge the "
                "adapter into the model's weights."
            )
    if halves := [module for module, parts in found.items() if len(parts) < 2]:
        raise CheckpointError(
            f"{WEIGHTS_FILE} has lora_A without lora_B, or the reverse, for {_some(halves)}; fetch "
            "the adapter again."
        )
    if not found:
        raise CheckpointError(f"{WEIGHTS_FILE} has no lora_A and lora_B; fetch the adapter again.")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}


def _is_ignored(name: str, config: AdapterConfig) -> bool:
    return name.removeprefix("base_model.model.").split(".")[0] in config.ignored


def _checked_modules(
    path: str, model: AdaptableModel, modules: list[str]
) -> dict[str, list[LoRALayer]]:
    known = model.by_module()
    others = [module for module in modules if module not in known]
    if strange := [module for module in others if not model.has_weight(module)]:
        raise AdapterMismatchError(
            f"LoRA adapter {path} is of another model: it changes {_some(strange)}, which "
            f"{model.architecture} has not. Serve the model that it was trained on."
        )
    if others:
        kinds = dict.fromkeys(layer.kind for layer in model.layers)
        raise UnsupportedAdapterError(
            f"LoRA adapter {path} changes {_some(others)}; here adapters may change "
            f"{', '.join(kinds)} only (embeddings, heads, routers and experts are not implemented; "
            "lora_target_modules may leave out more). Train it on these, or merge it into the "
            "model's weights."
        )
    return known


def _check_shapes(
    path: str, layers: list[LoRALayer], a: np.ndarray, b: np.ndarray, rank: int
) -> None:
    num_outputs = sum(layer.num_outputs for layer in layers)
    expected = (rank, layers[0].num_inputs), (num_outputs, rank)
    if (a.shape, b.shape) != expected:
        raise AdapterMismatchError(
            f"LoRA adapter {path} has lora_A {list(a.shape)} and lora_B {list(b.shape)} at "
            f"{layers[0].module} instead of {list(expected[0])} and {list(expected[1])}: it is of "
            "another model, or its adapter_config.json is. Serve the model that it was trained on."
        )


def _matrices(
    layer: LoRALayer, a: np.ndarray, b: np.ndarray, factor: float, dtype: str
) -> AdapterMatrices:
    own = b[layer.start : layer.start + layer.num_outputs].astype(np.float32).T * np.float32(factor)
    element = jnp.dtype(dtype)
    # Copies: files may be replaced under their views.
    return AdapterMatrices(
        np.array(a, element).reshape(-1, *layer.inputs.values()),
        np.array(own, element, order="C").reshape(-1, *layer.outputs.values()),
    )


def _digest(layers: Mapping[str, AdapterMatrices]) -> str:
    digest = hashlib.sha256()
    for path in sorted(layers):
        pair = layers[path]
        digest.update(f"{path} {pair.a.dtype} {pair.a.shape} {pair.b.shape}\0".encode())
        digest.update(_bytes(pair.a))
        digest.update(_bytes(pair.b))
    return digest.hexdigest()


def _bytes(values: np.ndarray) -> Any:
    return np.ascontiguousarray(values).view(np.uint8).data


def _some(names: list[str]) -> str:
    """Return the first few names, and how many there are beside them."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
