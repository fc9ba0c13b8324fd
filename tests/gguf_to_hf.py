"""Writes a Hugging Face directory from a GGUF file, so that both ways in can be compared."""

import json
from pathlib import Path

import ml_dtypes
from safetensors.numpy import save_file

from paged.models.gguf_config import gguf_hf_config
from paged.models.gguf_file import GGUFFile
from paged.models.gguf_source import GGUFSource
from paged.models.gguf_tokenizer import gguf_tokenizer


def write_hf_directory(gguf_path: Path, directory: Path) -> Path:
    """Write config, tokenizer and bfloat16 weights of a GGUF file; return the directory."""
    file = GGUFFile(gguf_path)
    config = gguf_hf_config(file)
    tokenizer = gguf_tokenizer(file)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=1))
    source = GGUFSource(file)
    weights = {name: source.read(name).astype(ml_dtypes.bfloat16) for name in source.names()}
    save_file(weights, directory / "model.safetensors")
    return directory
