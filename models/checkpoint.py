"""`open_checkpoint`: from what a user calls a model to its files, wherever they are.

A checkpoint is a Hugging Face directory, a GGUF file or what `paged convert` wrote; all are
presented alike. Nothing but names and headers is read until it is asked for.
"""

import contextlib
import glob
import os.path
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flax import nnx

from paged.models.chat_template import ChatTemplate
from paged.models.config import DTYPES, ModelConfig
from paged.models.demo import DEMO_MODEL_NAME, fetch_demo_model
from paged.models.errors import CheckpointError
from paged.models.forward import abstract_model
from paged.models.gguf_config import gguf_eos_token_ids, gguf_hf_config, gguf_model_config
from paged.models.gguf_file import GGUFFile
from paged.models.gguf_source import GGUFSource
from paged.models.gguf_tokenizer import gguf_tokenizer
from paged.models.json_file import read_json
from paged.models.saved_params import restore_params
from paged.models.tensor_source import TensorSource
from paged.models.tokenizer import Tokenizer
from paged.models.weights import SafetensorsSource, load_params

SAVED_FILE, SAVED_PARAMS = "paged.json", "params"
"""What tells a folder that `paged convert` wrote from others, and its folder of parameters."""

SAVED_FORMAT = 1
"""Version of what lies in such a folder."""

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""What names of repositories on the Hugging Face Hub look like."""

_ACCEPTED = "a local directory, a GGUF file or a Hugging Face model id (organisation/name)"
_HUB_GGUF = re.compile(rf"({HUB_ID.pattern}):(.+\.gguf)")
# What the engine reads. Not the duplicates that some repositories hold in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_DUPLICATES = ["original/*", "onnx/*", "consolidated*"]

# Key of generation_config.json -> sampling parameter.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class Checkpoint(ABC):
    """A model's files; each property is read when first asked for, then kept.

    Attributes:
      name: what the model is called towards users.
      path: directory or file.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @property
    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """What `config.json` says, or would say."""

    @cached_property
    def model_config(self) -> ModelConfig:
        """The shape of the model; raises `UnsupportedModelError` if it is not implemented."""
        return ModelConfig.from_hf(self.hf_config)

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `CheckpointError` if there is none that can be used."""

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's defaults for generation, with Hugging Face's keys; may be empty."""

    @property
    def pooling_modes(self) -> frozenset[str]:
        """How it wants hidden states pooled into a vector, such as "lasttoken"; may be empty."""
        return frozenset()

    @abstractmethod
    def open_source(self) -> TensorSource:
        """Return access to the tensors by name; raises `CheckpointError` if they are damaged."""

    def load_params(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        quantization: str | None = None,
        shardings: Any = None,
        kv_head_copies: int = 1,
        progress: bool = True,
    ) -> nnx.State[Any, Any]:
        """Return the parameters of `config`; see `paged.models.weights.load_params`."""
        with contextlib.closing(self.open_source()) as source:
            return load_params(
                config,
                source,
                dtype=dtype,
                quantization=quantization,
                shardings=shardings,
                kv_head_copies=kv_head_copies,
                progress=progress,
            )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text."""
        return self.tokenizer.eos_token_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What `generation_config` says about sampling, under the names of `SamplingParams`."""
        values = {name: self.generation_config.get(key) for key, name in _SAMPLING_KEYS.items()}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The compiled chat template, if there is one; raises `ChatTemplateError` if it is bad."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            return None
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


class DirectoryCheckpoint(Checkpoint):
    """A Hugging Face directory: config.json, tokenizer.json, *.safetensors."""

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        """See `Checkpoint.hf_config`."""
        return read_json(self.path / "config.json")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        return Tokenizer.from_directory(self.path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """See `Checkpoint.generation_config`."""
        return read_json(self.path / "generation_config.json")

    @cached_property
    def pooling_modes(self) -> frozenset[str]:
        """See `Checkpoint.pooling_modes`; what sentence-transformers keeps beside the model."""
        modes = read_json(self.path / "1_Pooling" / "config.json").items()
        matches = [
            re.fullmatch(r"pooling_mode_(\w+?)(?:_tokens?)?", key)
            for key, on in modes
            if on is True
        ]
        return frozenset(match[1] for match in matches if match)

    def open_source(self) -> TensorSource:
        """See `Checkpoint.open_source`."""
        return SafetensorsSource(self.path)


class SavedCheckpoint(DirectoryCheckpoint):
    """A folder that `paged convert` wrote: as a Hugging Face directory, but for the parameters.

    Raises:
      CheckpointError: if it was written by another version, in another format.
    """

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self._about = about = read_json(path / SAVED_FILE)
        if about.get("format") != SAVED_FORMAT or about.get("dtype") not in DTYPES:
            raise CheckpointError(
                f"{path / SAVED_FILE}: format={about.get('format')!r} with dtype="
                f"{about.get('dtype')!r} is not what this version reads (format {SAVED_FORMAT}); "
                "run `paged convert` again."
            )

    @cached_property
    def model_config(self) -> ModelConfig:
        """See `Checkpoint.model_config`; as the parameters were saved."""
        config = ModelConfig.from_hf(self.hf_config)
        return replace(
            config, dtype=self._about["dtype"], saved_quantization=self._about.get("quantization")
        )

    def open_source(self) -> TensorSource:
        """Raise: there are no tensors under the names of a checkpoint."""
        raise CheckpointError(f"{self.path} holds saved parameters; use load_params.")

    def load_params(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        quantization: str | None = None,
        shardings: Any = None,
        kv_head_copies: int = 1,
        progress: bool = True,
    ) -> nnx.State[Any, Any]:
        """See `Checkpoint.load_params`; raises `CheckpointError` if they do not fit the config."""
        stored = replace(config, num_kv_heads=kv_head_copies * config.num_kv_heads)
        _, expected = abstract_model(stored, dtype=dtype, quantization=quantization)
        return restore_params(
            self.path / SAVED_PARAMS,
            expected,
            shardings=shardings,
            kv_head_copies=kv_head_copies,
            progress=progress,
        )


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, which holds everything."""

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.path)

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        """See `Checkpoint.hf_config`."""
        return gguf_hf_config(self._file)

    @cached_property
    def model_config(self) -> ModelConfig:
        """See `Checkpoint.model_config`."""
        return gguf_model_config(self._file)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        return gguf_tokenizer(self._file)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """See `Checkpoint.generation_config`; the file knows only where texts end."""
        return {"eos_token_id": list(gguf_eos_token_ids(self._file.metadata))}

    def open_source(self) -> TensorSource:
        """See `Checkpoint.open_source`."""
        return GGUFSource(self._file)


def open_checkpoint(
    model: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Checkpoint:
    """Find a checkpoint, downloading it if need be.

    Args:
      model: a directory, a GGUF file, a Hugging Face model id, or `organisation/name:file.gguf`
        for one file of a model on the Hub; None takes the demo model. A local path comes first.
      revision: branch, tag or commit on the Hub.
      token: access token for the Hub; None takes the one that `huggingface_hub` finds.
      cache_dir: folder of the demo model, see `fetch_demo_model`.

    Returns:
      The checkpoint, named `model` as given.

    Raises:
      CheckpointError: if there is no such checkpoint, or it cannot be fetched.
    """
    if model is None:
        return GGUFCheckpoint(DEMO_MODEL_NAME, fetch_demo_model(cache_dir=cache_dir))
    path = Path(os.path.expanduser(model))  # pathlib raises on an unknown "~user"
    if path.is_dir():
        return _open_directory(model, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{model} is no directory and no .gguf file; pass {_ACCEPTED}.")
        return GGUFCheckpoint(model, path)
    if match := _HUB_GGUF.fullmatch(model):
        return GGUFCheckpoint(model, _fetch_file(match[1], match[2], revision, token))
    if path.suffix != ".gguf" and HUB_ID.fullmatch(model):
        return _open_directory(model, fetch_folder(model, _HUB_FILES, revision, token))
    raise CheckpointError(f"{model} does not exist; pass {_ACCEPTED}.")


def read_model_config(
    model: str, *, revision: str | None = None, token: str | None = None
) -> ModelConfig:
    """Return the shape of a model without its weights.

    Args:
      model: a directory, a `config.json`, a GGUF file or a Hugging Face model id, of which only
        config.json is fetched.
      revision, token: as in `open_checkpoint`.

    Raises:
      CheckpointError: if there is no such model, or it cannot be fetched.
      UnsupportedModelError: if it is not implemented.
    """
    path = Path(os.path.expanduser(model))
    if path.is_file() and path.suffix == ".json":
        return ModelConfig.from_hf(read_json(path))
    if not path.exists() and _HUB_GGUF.fullmatch(model):
        raise CheckpointError(
            f"{model}: the shape of a GGUF file on the Hub is known only once all of it is here; "
            "fetch it and pass its path, or name a repository that has a config.json."
        )
    if not path.exists() and path.suffix != ".gguf" and HUB_ID.fullmatch(model):
        return _open_directory(
            model, fetch_folder(model, ["config.json"], revision, token)
        ).model_config
    return open_checkpoint(model).model_config


def _open_directory(model: str, path: Path) -> Checkpoint:
    if (path / SAVED_FILE).is_file():
        return SavedCheckpoint(model, path)
    if (path / SAVED_PARAMS).is_dir() and not any(path.glob("*.safetensors*")):
        raise CheckpointError(
            f"{model} has {SAVED_PARAMS}/ but no {SAVED_FILE}: `paged convert` did not finish; run "
            "it again."
        )
    if (path / "config.json").is_file():
        return DirectoryCheckpoint(model, path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"pass one of its GGUF files ({', '.join(files[:4])})" if files else f"pass {_ACCEPTED}"
    raise CheckpointError(f"{model} has no config.json; {hint}.")


def fetch_folder(
    model: str, patterns: list[str], revision: str | None = None, token: str | None = None
) -> Path:
    """Return the folder of a model of the Hub; the cached one where the Hub cannot be reached.

    Args:
      model: id of a repository.
      patterns: of the files that are wanted.
      revision, token: as in `open_checkpoint`.

    Raises:
      CheckpointError: if it cannot be fetched.
    """
    # Imported here: most runs need no Hub.
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                token=token,
                allow_patterns=patterns,
                ignore_patterns=_HUB_DUPLICATES,
            )
        )
    except Exception as error:  # the network, the Hub, the disk: see _hub_error
        raise _hub_error(model, error) from error


def _fetch_file(model: str, file: str, revision: str | None, token: str | None) -> Path:
    """Return the path of one file of a model of the Hub."""
    path = fetch_folder(model, [glob.escape(file)], revision, token) / file
    if not path.is_file():
        raise CheckpointError(f"{model} has no file {file}; pass {_ACCEPTED}.")
    return path


def _hub_error(model: str, error: Exception) -> CheckpointError:
    """One line on why the Hub did not deliver; the cause keeps the rest."""
    lines = str(error).strip().splitlines() or [""]
    return CheckpointError(
        f"{model} is no local path and could not be fetched from the Hugging Face Hub "
        f"({type(error).__name__}: {lines[0].strip()}); check the name, the network and, for a "
        f"gated model, HF_TOKEN, or pass {_ACCEPTED}."
    )
