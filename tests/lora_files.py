"""Adapters on disk, and models with an adapter merged into them: what PEFT's own code does."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    scale: float = 0.3,
    **fields: Any,
) -> Path:
    """Write a random adapter for modules, given as name -> (outputs, inputs); return its folder."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (num_outputs, num_inputs) in shapes.items():
        own = fields.get("rank_pattern", {}).get(module.rsplit(".", 1)[-1], rank)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.standard_normal((own, num_inputs))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = scale * rng.standard_normal((num_outputs, own))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **fields}
    return write_files(folder, config, tensors)


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Write the two files of an adapter; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stored = {name: values.astype(np.float32) for name, values in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the linear layers in a checkpoint's decoder layers."""
    tensors = load_model(model)
    return {
        name.removesuffix(".weight"): (values.shape[0], values.shape[1])
        for name, values in tensors.items()
        if name.endswith("_proj.weight")
    }


def merge(model: Path, adapter: Path, out: Path) -> Path:
    """Write a copy of a model, in float32, with the adapter in its weights; return its folder."""
    shutil.copytree(model, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    matrices = load_file(adapter / "adapter_model.safetensors")
    tensors = load_model(model)
    for name, a in matrices.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = matrices[name.replace(".lora_A.", ".lora_B.")]
        rank = a.shape[0]
        factor = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + factor * (b @ a)
    save_file(
        {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()},
        out / "model.safetensors",
    )
    return out


def load_model(folder: Path) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors in float32."""
    import ml_dtypes  # noqa: F401 - names bfloat16 for NumPy

    return {
        name: values.astype(np.float32)
        for name, values in load_file(folder / "model.safetensors").items()
    }
