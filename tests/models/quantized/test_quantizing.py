"""A weight that is quantised block by block is the one that is quantised at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.quantized.block_float8_weight import BlockFloat8Form
from paged.models.quantized.float8_weight import Float8Form
from paged.models.quantized.grouped_weight import GroupedForm
from paged.models.quantized.int8_weight import Int8Form
from paged.models.quantized.quantizing import quantize_weight
from paged.models.quantized.stacked_form import StackedForm

FORMS = [
    (Int8Form(), 2),
    (Float8Form("static"), 1),
    (GroupedForm(4, 8, has_zeros=True), 1),
    (GroupedForm(8, None, has_zeros=False, is_permuted=True), 2),
    (BlockFloat8Form(8, rounds_activations=True), 1),
    (StackedForm(GroupedForm(4, 8, has_zeros=True)), 2),
]


@pytest.mark.parametrize(("form", "num_output_axes"), FORMS)
# One output after the other, several with a rest, and more than there are.
@pytest.mark.parametrize("block_bytes", [1, 5 * 3 * 16 * 4, 1 << 20])
def test_blocks_are_joined_where_they_belong(form, num_output_axes: int, block_bytes: int):
    shape = (13, 3, 16) if num_output_axes == 2 else (13, 48)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = form.quantize(jnp.asarray(values), num_output_axes)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = quantize_weight(
        form,
        num_output_axes,
        values,
        np.dtype(np.float32),
        dict.fromkeys(expected, device),
        block_bytes,
    )
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert (found[name].dtype, found[name].sharding) == (part.dtype, device)
        wide, wanted = (np.asarray(a, np.float32) for a in (found[name], part))
        # Compiled or not, a quotient may be rounded to the other side.
        np.testing.assert_allclose(wide, wanted, rtol=2**-3, atol=1 if name == "values" else 1e-6)
        assert (wide != wanted).mean() < 0.02
