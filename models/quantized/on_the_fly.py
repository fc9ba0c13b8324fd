"""What `--quantization` makes of a checkpoint in 16 or 32 bits while it is loaded."""

from collections.abc import Mapping
from typing import Protocol

from paged.models.quantized.float8_weight import Float8Form
from paged.models.quantized.form import WeightForm
from paged.models.quantized.grouped_weight import GroupedForm
from paged.models.quantized.int8_weight import Int8Form

# Largest first: fewer scales. All are groups that the kernels take.
_GROUP_SIZES = (128, 64, 32)


class _Choice(Protocol):
    def __call__(self, num_inputs: int, *, is_head: bool) -> WeightForm | None:
        """Return the form of a weight, None for one that stays as it is."""


def _int8(num_inputs: int, *, is_head: bool) -> WeightForm:
    return Int8Form()


def _int4(num_inputs: int, *, is_head: bool) -> WeightForm:
    group_size = next((size for size in _GROUP_SIZES if num_inputs % size == 0), None)
    # The head decides between tokens, and what a table of embeddings looks up is a whole row: both
    # suffer most. Inputs that make no groups are few.
    if is_head or group_size is None:
        return Int8Form()
    return GroupedForm(bits=4, group_size=group_size, has_zeros=True)


def _fp8(num_inputs: int, *, is_head: bool) -> WeightForm | None:
    return None if is_head else Float8Form()


ON_THE_FLY: Mapping[str, _Choice] = {"int8": _int8, "int4": _int4, "fp8": _fp8}
"""Name -> the form of a linear layer's weight, and of the head's."""
