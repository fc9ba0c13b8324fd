"""Tensors of experts become stacks, and what is missing among them is named."""

import numpy as np
import pytest

from paged.models.errors import CheckpointError
from paged.models.expert_source import arrange_gpt_oss, stack_experts
from tests.models.array_source import ArraySource


def numbered(experts: range, shape: tuple[int, ...] = (2, 3)) -> dict[str, np.ndarray]:
    return {
        f"layers.{layer}.experts.{i}.w1.weight": np.full(shape, 100 * layer + i, np.float32)
        for layer in range(2)
        for i in experts
    }


def test_experts_are_stacked_by_number_not_by_name():
    tensors = numbered(range(12)) | {"norm.weight": np.ones(3, np.float32)}
    source = stack_experts(ArraySource(dict(reversed(tensors.items()))))
    stacks = [f"layers.{layer}.experts.w1.weight" for layer in range(2)]
    assert sorted(source.names()) == [*stacks, "norm.weight"]
    assert source.shape(stacks[1]) == (12, 2, 3)
    np.testing.assert_array_equal(source.read(stacks[1])[:, 0, 0], 100 + np.arange(12))
    np.testing.assert_array_equal(source.read("norm.weight"), np.ones(3))
    assert source.shape("norm.weight") == (3,)


def test_a_stack_belongs_to_the_caller_and_has_the_tensors_type():
    source = stack_experts(ArraySource({"x.experts.0.w": np.zeros((2, 3), np.float16)}))
    stack = source.read("x.experts.w")
    assert (stack.dtype, stack.flags.writeable) == (np.float16, True)


def test_closing_closes_what_is_below():
    below = ArraySource({})
    stack_experts(below).close()
    assert below.is_closed


def test_missing_and_misshapen_experts_are_all_named():
    tensors = numbered(range(4))
    del tensors["layers.0.experts.1.w1.weight"]
    tensors["layers.1.experts.2.w1.weight"] = np.zeros((2, 4))
    with pytest.raises(CheckpointError, match="do not fit each other") as error:
        stack_experts(ArraySource(tensors))
    assert "missing: layers.0.experts.1.w1.weight" in str(error.value)
    assert "layers.1.experts.2.w1.weight [2, 4] instead of [2, 3]" in str(error.value)


def test_gates_of_gpt_oss_are_taken_apart_and_outputs_come_first():
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 3, 5, 4))  # [experts, outputs, inputs]
    down = rng.standard_normal((3, 4, 5))
    mixed = np.stack([gate, up], axis=2).reshape(3, 10, 4)  # outputs alternate
    base = "model.layers.0.mlp.experts"
    source = arrange_gpt_oss(
        ArraySource(
            {
                f"{base}.gate_up_proj": mixed.swapaxes(1, 2),
                f"{base}.gate_up_proj_bias": mixed[..., 0],
                f"{base}.gate_up_proj_blocks": mixed[..., None],
                f"{base}.down_proj": down.swapaxes(1, 2),
                f"{base}.down_proj_bias": down[..., 0],
                f"{base}.down_proj_scales": down,
                "model.layers.0.mlp.router.weight": down[0],
            }
        )
    )
    expected = {
        f"{base}.gate_up_proj:gate": gate,
        f"{base}.gate_up_proj:up": up,
        f"{base}.gate_up_proj_bias:gate": gate[..., 0],
        f"{base}.gate_up_proj_bias:up": up[..., 0],
        f"{base}.gate_up_proj_blocks:gate": gate[..., None],
        f"{base}.gate_up_proj_blocks:up": up[..., None],
        f"{base}.down_proj:down": down,
        f"{base}.down_proj_bias:down": down[..., 0],
        f"{base}.down_proj_scales:down": down,
        "model.layers.0.mlp.router.weight": down[0],
    }
    assert sorted(source.names()) == sorted(expected)
    for name, value in expected.items():
        assert source.shape(name) == value.shape
        np.testing.assert_array_equal(source.read(name), value)


def test_what_is_arranged_stays_so():
    names = ["gate_up_proj:gate", "gate_up_proj_blocks:up", "down_proj:down", "down_proj_bias:down"]
    tensors = {f"model.layers.0.mlp.experts.{name}": np.ones((2, 3, 4)) for name in names}
    source = arrange_gpt_oss(ArraySource(tensors))
    assert source.names() == list(tensors)
