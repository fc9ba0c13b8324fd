"""Memory to blocks, with the figures of the reference engine's documentation."""

import pytest

from paged.kv_cache import KVCacheSpec
from paged.scheduler.capacity import (
    GIB,
    MemoryBudget,
    available_kv_bytes,
    check_one_request_fits,
    describe_capacity,
)
from paged.scheduler.errors import CapacityError

# 2 MiB per block of 16: 32 layers of 8 kv heads of 128 in bfloat16.
SPEC = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


def test_the_null_block_counts_against_the_longest_request():
    assert SPEC.bytes_per_block == 2 * 2**20
    num_blocks = SPEC.blocks_that_fit(GIB)
    assert num_blocks == 512
    with pytest.raises(CapacityError, match=r"needs 512 KV blocks .* only 511 .* to 8176 or less"):
        check_one_request_fits(SPEC, num_blocks, 8192)
    check_one_request_fits(SPEC, num_blocks, 8176)
    check_one_request_fits(SPEC, SPEC.blocks_that_fit(GIB + 2 * 2**20), 8192)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "tokens", "concurrency"),
    [
        (1345, 8192, "21,520", "2.63x"),
        (1345, 8190, "21,514", "2.63x"),
        (1345, 16, "21,520", "1345.00x"),
        (513, 8192, "8,208", "1.00x"),
    ],
)
def test_the_log_line_says_tokens_and_concurrency(num_blocks, max_model_len, tokens, concurrency):
    line = describe_capacity(SPEC, num_blocks, max_model_len)
    assert f"GPU KV cache size: {tokens} tokens" in line
    assert f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency}" in line


def test_an_accelerator_is_used_up_to_its_share_weights_included():
    budget = MemoryBudget(
        total_bytes=80 * GIB,
        free_bytes=75 * GIB,
        weight_bytes=15 * GIB,
        activation_bytes=2 * GIB,
        shared_with_host=False,
    )
    assert available_kv_bytes(budget, 0.9) == pytest.approx((72 - 5 - 15 - 2) * GIB, abs=1)


def test_a_cpu_gives_a_share_of_what_is_free_and_no_more_than_two_gib():
    small = MemoryBudget(16 * GIB, 4 * GIB, GIB // 2, GIB, shared_with_host=True)
    assert available_kv_bytes(small, 0.5) == GIB // 2
    large = MemoryBudget(512 * GIB, 400 * GIB, GIB, GIB, shared_with_host=True)
    assert available_kv_bytes(large, 0.9) == 2 * GIB


def test_no_memory_left_says_what_to_turn():
    budget = MemoryBudget(8 * GIB, GIB, GIB, 2 * GIB, shared_with_host=False)
    with pytest.raises(CapacityError, match=r"No available memory for the cache blocks.*raise it"):
        available_kv_bytes(budget, 0.5)
