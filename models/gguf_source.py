"""`GGUFSource`: the tensors of a GGUF file under their Hugging Face names and in that layout.

Values are dequantised with numpy and rounded to bfloat16, the precision of the checkpoints that
the files were made from: without the rounding SmolLM2's logits move by up to 0.1.
"""

import math
import re
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from paged.models.errors import CheckpointError
from paged.models.gguf_config import ROPE_FACTORS, gguf_family, gguf_hf_config, keeps_mxfp4
from paged.models.gguf_families import GGUFFamily
from paged.models.gguf_file import GGUFFile, GGUFTensor
from paged.models.gguf_mxfp4 import Mxfp4Half
from paged.models.host_memory import drop_pages, empty_array

# Values dequantised at once: bounds the float32 copy to 16 MB.
_SLICE_VALUES = 1 << 22
# gguf works on 16 rows at a time, little for one numpy call where rows are short. Joining eight
# rows to one takes 0.4 s instead of 0.6 s for SmolLM2 135M; blocks never span rows, so it is safe.
_JOINED_ROWS = 8

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class GGUFSource:
    """A `TensorSource` over a GGUF file.

    Args:
      file: the file, or its path.

    Raises:
      CheckpointError: if the file cannot be read.
      UnsupportedModelError: if its architecture or one of its settings is not implemented.
    """

    def __init__(self, file: GGUFFile | str | Path) -> None:
        self._file = file if isinstance(file, GGUFFile) else GGUFFile(file)
        config = gguf_hf_config(self._file)
        self._family = family = gguf_family(self._file)
        # The projections whose rows llama.cpp reorders, and their numbers of heads.
        self._num_heads: dict[str, int] = {}
        if family.pairs_rows:
            self._num_heads["attn_q"] = config["num_attention_heads"]
            self._num_heads["attn_k"] = config["num_key_value_heads"]
        self._tensors: dict[str, GGUFTensor] = {}
        # The two halves of tensors that stay in MXFP4, by their names.
        self._blocks: dict[str, tuple[GGUFTensor, Mxfp4Half]] = {}
        keeps_blocks = keeps_mxfp4(self._file)
        for name, tensor in self._file.tensors.items():
            if name in ROPE_FACTORS:
                continue
            hf_name = hf_tensor_name(name, family)
            if keeps_blocks and tensor.kind is gguf.GGMLQuantizationType.MXFP4:
                stem, _, part = hf_name.partition(":")
                for half in Mxfp4Half:
                    self._blocks[f"{stem}_{half.value}:{part}"] = tensor, half
            else:
                self._tensors[hf_name] = tensor

    def names(self) -> list[str]:
        """Return the names of all tensors; one without a Hugging Face name keeps its own."""
        return [*self._tensors, *self._blocks]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, `[out, in]` for matrices."""
        if name in self._blocks:
            tensor, half = self._blocks[name]
            return half.shape(tensor.shape)
        return self._tensors[name].shape

    def close(self) -> None:
        """Let go of the tensors; the file stays mapped as long as its `GGUFFile` lives."""
        self._tensors.clear()
        self._blocks.clear()

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as bfloat16, or as bytes what stays in MXFP4.

        Raises:
          CheckpointError: if the block type cannot be dequantised.
        """
        if name in self._blocks:
            tensor, half = self._blocks[name]
            return half.read(tensor.data, tensor.shape)
        tensor = self._tensors[name]
        rows = tensor.data
        if (num_heads := self._num_heads.get(_base(tensor.name))) is not None:
            rows = _halves_from_pairs(rows.reshape(tensor.shape[0], -1), num_heads)
            rows = rows.reshape(tensor.data.shape)
        offset = -1 if self._family.adds_one and tensor.name.endswith("norm.weight") else 0
        try:
            return _dequantize(rows, tensor, offset)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name!r} has type {tensor.kind.name}, which "
                "cannot be dequantised; pass a file quantised otherwise, such as Q8_0 or Q4_K_M."
            ) from None


def hf_tensor_name(name: str, family: GGUFFamily) -> str:
    """Return the Hugging Face name of a GGUF tensor, or the name itself if it has none.

    >>> hf_tensor_name("blk.3.attn_q.weight", GGUF_FAMILIES["llama"])
    'model.layers.3.self_attn.q_proj.weight'
    """
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(?:(\d+)\.)?(weight|bias)", name):
        layer, base, expert, suffix = match.groups()
        if (whole := family.whole_names.get(f"{base}.{suffix}")) is not None:
            return f"model.layers.{layer}.{whole}"
        in_layer = family.layer_tensors.get(base if expert is None else f"{base}_exps")
        if in_layer is None:
            return name
        if expert is not None:
            in_layer = in_layer.replace(".experts.", f".experts.{expert}.")
        return f"model.layers.{layer}.{in_layer}.{suffix}"
    base, _, suffix = name.partition(".")
    return f"{_TOP[base]}.{suffix}" if base in _TOP else name


def _base(name: str) -> str:
    """The part of a GGUF name that says what the tensor is: "attn_q" of "blk.0.attn_q.weight"."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _halves_from_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from llama.cpp's rotary layout to Hugging Face's.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates row i with row
    i + head_dim / 2. Works on quantised rows, since blocks never span rows.
    """
    num_rows, row_bytes = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, row_bytes)
    return pairs.swapaxes(1, 2).reshape(num_rows, row_bytes)


def _dequantize(rows: np.ndarray, tensor: GGUFTensor, offset: int) -> np.ndarray:
    """Return the values of quantised `rows` (uint8 `[num_rows, row_bytes]`) as bfloat16.

    `offset` is added to them before they are rounded.
    """
    if not offset and tensor.kind is gguf.GGMLQuantizationType.BF16:
        stored: np.ndarray = rows.view(ml_dtypes.bfloat16)
        return stored.reshape(tensor.shape)
    row_values = tensor.shape[-1]
    out = empty_array((rows.shape[0], row_values), np.dtype(ml_dtypes.bfloat16))
    step = max(1, _SLICE_VALUES // row_values)
    for start in range(0, len(out), step):
        part = rows[start : start + step]
        joined = math.gcd(len(part), _JOINED_ROWS)
        values = gguf.dequantize(part.reshape(len(part) // joined, -1), tensor.kind)
        values = values.reshape(len(part), row_values)
        out[start : start + step] = values + offset if offset else values
        drop_pages(part)
    return out.reshape(tensor.shape)
