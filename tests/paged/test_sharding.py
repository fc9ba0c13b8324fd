"""Logical axes become placements on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from paged.kv_cache import KVCacheSpec, allocate_kv_cache
from paged.sharding import KV_CACHE_AXES, ShardingRules, tensor_parallel_mesh

RULES = ShardingRules()


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("vocab", "embed"), PartitionSpec("tp", None)),
        (("embed", "q_heads", "head_dim"), PartitionSpec(None, "tp", None)),
        (("embed", "mlp"), PartitionSpec(None, "tp")),
        (("layers", "kv_heads", None), PartitionSpec(None, "tp", None)),
        ((), PartitionSpec()),
    ],
)
def test_default_rules_split_heads_mlp_and_vocabulary(axes, spec: PartitionSpec):
    assert RULES.partition_spec(axes) == spec


def test_cache_is_split_by_kv_heads():
    assert RULES.kv_cache_spec() == PartitionSpec(None, None, "tp", None, None)


def test_rule_can_be_changed():
    rules = ShardingRules(vocab=None, embed="fsdp")
    assert rules.partition_spec(("vocab", "embed")) == PartitionSpec(None, "fsdp")


def test_one_mesh_axis_cannot_split_two_axes():
    with pytest.raises(ValueError, match=r"\('q_heads', 'mlp'\) use mesh axis 'tp' 2 times"):
        RULES.partition_spec(("q_heads", "mlp"))


def test_an_expert_that_is_on_one_device_is_whole_there():
    axes = ("experts", "mlp", "embed")
    assert RULES.partition_spec(axes) == PartitionSpec(None, "tp", None)
    assert ShardingRules(experts="tp").partition_spec(axes) == PartitionSpec("tp", None, None)


def test_unknown_axis_lists_the_rules():
    with pytest.raises(
        ValueError, match=r"logical axis 'rows' has no rule; the rules are .*'vocab'"
    ):
        RULES.partition_spec(("rows", "embed"))


def test_mesh_without_the_axis_is_an_error():
    mesh = tensor_parallel_mesh(1)
    with pytest.raises(ValueError, match=r"mesh axis 'data' is not in mesh.axis_names=\('tp',\)"):
        ShardingRules(mlp="data").named_sharding(mesh, ("embed", "mlp"))


@pytest.mark.parametrize("num_devices", [0, 99])
def test_mesh_needs_devices(num_devices: int):
    with pytest.raises(ValueError, match=f"num_devices={num_devices} must be between 1 and"):
        tensor_parallel_mesh(num_devices)


def test_mesh_takes_the_devices_it_is_given():
    devices = jax.devices()[1:3]
    assert tensor_parallel_mesh(2, devices).devices.tolist() == devices


def test_array_is_split_over_two_devices():
    mesh = tensor_parallel_mesh(2)
    weights = jnp.arange(24, dtype=jnp.float32).reshape(3, 8)
    placed = jax.device_put(weights, RULES.named_sharding(mesh, ("embed", "mlp")))
    shards = sorted(placed.addressable_shards, key=lambda shard: shard.index[1].start or 0)
    assert [shard.data.shape for shard in shards] == [(3, 4), (3, 4)]
    assert len({shard.device for shard in shards}) == 2
    np.testing.assert_array_equal(shards[1].data, np.asarray(weights)[:, 4:])


def test_each_device_holds_its_heads_of_the_cache():
    spec = KVCacheSpec(num_layers=1, num_kv_heads=4, head_dim=8, block_size=2, dtype="bfloat16")
    mesh = tensor_parallel_mesh(2)
    cache = allocate_kv_cache(spec, 3, RULES.named_sharding(mesh, KV_CACHE_AXES))
    shapes = [shard.data.shape for shard in cache.layers[0].addressable_shards]
    assert shapes == [(3, 2, 2, 2, 8)] * 2
