"""Memory to blocks, with the figures of the reference engine's documentation."""

import dataclasses
import re

import pytest

from paged.kv_cache import KVCacheSpec
from paged.scheduler.capacity import (
    GIB,
    MemoryBudget,
    available_kv_bytes,
    blocks_per_request,
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


def test_a_sliding_group_needs_its_window_and_what_is_in_flight():
    # The documented example: w = 4096, two steps of 2048 tokens, a long context.
    in_flight = {"num_tokens_in_flight": 2 * 2048}
    assert blocks_per_request(SPEC, 100_000, [4096], **in_flight) == 513
    assert blocks_per_request(SPEC, 100_000, [None, 4096, 4096], **in_flight) == 6250 + 2 * 513
    # A context shorter than the window caps it.
    assert blocks_per_request(SPEC, 1000, [None, 4096], **in_flight) == 63 + 64


def test_the_longest_context_that_fits_counts_every_group():
    windows = (None, 256)
    with pytest.raises(
        CapacityError, match=r"needs 530 KV blocks .* only 99 .* to (\d+) or"
    ) as got:
        check_one_request_fits(SPEC, 100, 8192, windows, num_tokens_in_flight=16)
    longest = int(re.search(r"to (\d+) or", str(got.value))[1])
    fits = {n for n in range(1, 8193) if -(-n // 16) + -(-min(255 + 16, n) // 16) + 1 <= 99}
    assert longest == max(fits)
    check_one_request_fits(SPEC, 100, longest, windows, num_tokens_in_flight=16)


def test_no_context_fits_into_the_null_block_alone():
    with pytest.raises(CapacityError, match=r"only 0 .* to 0 or less"):
        check_one_request_fits(SPEC, 1, 8192)


def test_concurrency_counts_the_blocks_of_all_groups():
    line = describe_capacity(SPEC, 1000, 4096, [None, 1024, 1024], num_tokens_in_flight=1024)
    # 256 blocks, and twice ceil((1023 + 1024) / 16) + 1 = 129.
    assert "GPU KV cache size: 7,968 tokens" in line
    assert "concurrency for 4,096 tokens per request: 1.95x" in line


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


def test_devices_of_a_cpu_share_its_memory_and_those_of_a_machine_have_their_own():
    cpu = MemoryBudget(16 * GIB, 8 * GIB, GIB // 2, 0, shared_with_host=True, num_devices=4)
    assert available_kv_bytes(cpu, 0.5) == GIB // 2
    large = dataclasses.replace(cpu, total_bytes=512 * GIB, free_bytes=400 * GIB)
    assert available_kv_bytes(large, 0.9) == 2 * GIB // 4
    gpu = dataclasses.replace(cpu, free_bytes=16 * GIB, shared_with_host=False)
    assert available_kv_bytes(gpu, 0.5) == 8 * GIB - GIB // 2


def test_no_memory_left_says_what_to_turn():
    budget = MemoryBudget(8 * GIB, GIB, GIB, 2 * GIB, shared_with_host=False)
    with pytest.raises(CapacityError, match=r"No available memory for the cache blocks.*raise it"):
        available_kv_bytes(budget, 0.5)
