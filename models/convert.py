"""`convert_checkpoint`: any checkpoint to a folder in the engine's own format."""

import json
import shutil
from pathlib import Path
from typing import Any

from paged._version import __version__
from paged.models.checkpoint import SAVED_FILE, SAVED_FORMAT, SAVED_PARAMS, Checkpoint
from paged.models.errors import CheckpointError
from paged.models.quantization import resolve_quantization
from paged.models.saved_params import save_params
from paged.models.weights import resolve_dtype


def convert_checkpoint(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    progress: bool = True,
) -> None:
    """Write a checkpoint into a folder from which parameters are restored as they are.

    The folder has the parameters as the engine keeps them, and the config, the tokenizer, the chat
    template and the defaults for generation in the files of a Hugging Face directory. An
    interrupted conversion leaves no `paged.json`, and is no checkpoint.

    Args:
      checkpoint: see `open_checkpoint`.
      out: missing or empty.
      dtype: element type, see `resolve_dtype`.
      quantization: what weights are brought to, see `resolve_quantization`.
      progress: show bars on standard error.

    Raises:
      ValueError: if `out` holds something, or a setting is unknown or contradicts the checkpoint.
      CheckpointError: if the checkpoint is damaged, or `out` cannot be written.
    """
    folder, config = Path(out), checkpoint.model_config
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no empty folder; name a new one.")
    dtype = resolve_dtype(dtype, config)
    quantization = resolve_quantization(quantization, config.quantization_method)
    tokenizer = checkpoint.tokenizer  # before anything is written: it may not be supported
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if checkpoint.path.is_dir():
            _copy_settings(checkpoint.path, folder)
        else:
            tokenizer.backend.save(str(folder / "tokenizer.json"))
            _write_settings(checkpoint, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror}); name a folder on a disk with room."
        ) from None
    params = checkpoint.load_params(
        config, dtype=dtype, quantization=quantization, progress=progress
    )
    save_params(params, folder / SAVED_PARAMS)
    # A format of the checkpoint itself is in its config.json.
    saved = quantization if config.quantization is None else None
    about = {"format": SAVED_FORMAT, "version": __version__, "dtype": dtype, "quantization": saved}
    _write_json(folder / SAVED_FILE, about)


def _copy_settings(source: Path, folder: Path) -> None:
    """Copy what a Hugging Face directory has beside its weights, as far as the engine reads it."""
    files = [*source.glob("*.json"), *source.glob("*.jinja"), source / "1_Pooling" / "config.json"]
    for file in files:
        if file.is_file() and not file.name.endswith(".index.json") and file.name != SAVED_FILE:
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _write_settings(checkpoint: Checkpoint, folder: Path) -> None:
    """Write what a GGUF file says beside its weights."""
    tokenizer = checkpoint.tokenizer
    _write_json(folder / "config.json", checkpoint.hf_config)
    _write_json(
        folder / "tokenizer_config.json",
        {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token},
    )
    _write_json(folder / "generation_config.json", checkpoint.generation_config)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    # Numbers of NumPy's are in the metadata of GGUF files.
    text = json.dumps(value, indent=2, ensure_ascii=False, default=lambda number: number.item())
    path.write_text(text + "\n", encoding="utf-8")
