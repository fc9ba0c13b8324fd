"""Block hashes, and what equal prefixes share when requests run through the scheduler."""

import random

import cbor2
import numpy as np
import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.output import ModelRunnerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.prefix_cache import NONE_HASH, HashIndex, PrefixHasher
from paged.scheduler.prefix_stats import PrefixStats
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
HASHER = PrefixHasher()
FIRST, SECOND = range(16), range(16, 32)


def make_request(request_id, token_ids, max_tokens=1, cache_salt=None) -> Request:
    return Request(
        request_id,
        tuple(token_ids),
        SamplingParams(max_tokens=max_tokens),
        max_tokens,
        cache_salt=cache_salt,
    )


def make_scheduler(pool: BlockPool, max_num_batched_tokens=2048) -> Scheduler:
    return Scheduler(
        pool=pool,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=8192,
    )


def run(scheduler: Scheduler, request: Request) -> list[int]:
    """Serve one request alone; return the block table it had in its last step."""
    scheduler.add(request)
    block_ids: list[int] = []
    while scheduler.num_unfinished:
        output = scheduler.schedule()
        block_ids = list(request.block_ids)
        tokens = np.full(len(output.scheduled), 50_000, np.int32)
        scheduler.update(output, ModelRunnerOutput(tokens))
    return block_ids


# Vectors of vLLM's sha256_cbor.
def test_root_hash_is_fixed():
    assert NONE_HASH.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_hashes_equal_the_reference():
    block_0 = HASHER.hash_block(NONE_HASH, FIRST, None)
    assert block_0.hex() == "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
    block_1 = HASHER.hash_block(block_0, SECOND, None)
    assert block_1.hex() == "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c"


def test_hashed_bytes_are_canonical_cbor():
    expected = "835820" + NONE_HASH.hex() + "90000102030405060708090a0b0c0d0e0ff6"
    assert cbor2.dumps((NONE_HASH, tuple(FIRST), None), canonical=True).hex() == expected


@pytest.mark.parametrize(
    ("extra_keys", "expected"),
    [
        (
            (("cache_salt", "tenant-a"),),
            "4e31e1ced73eb044a95997f0109d0ddab3d9145878214f1a0ee37c048b397859",
        ),
        (
            (("lora", "sql", "/m/sql"),),
            "2750a92faf5c609c9c18a3875c193019ff0a41b0b19de9468fcd61db83116cac",
        ),
    ],
)
def test_extra_keys_change_the_hash_as_in_the_reference(extra_keys, expected):
    assert HASHER.hash_block(NONE_HASH, FIRST, extra_keys).hex() == expected


def test_salt_enters_the_first_block_only():
    request = make_request("a", range(32), cache_salt="tenant-a")
    HASHER.extend(request, BLOCK_SIZE)
    salted = HASHER.hash_block(NONE_HASH, FIRST, (("cache_salt", "tenant-a"),))
    assert request.block_hashes == [salted, HASHER.hash_block(salted, SECOND, None)]


def test_only_full_blocks_are_hashed_and_output_completes_them():
    request = make_request("a", range(20))
    HASHER.extend(request, BLOCK_SIZE)
    block_0 = HASHER.hash_block(NONE_HASH, FIRST, None)
    assert request.block_hashes == [block_0]
    request.output_token_ids += range(20, 31)
    HASHER.extend(request, BLOCK_SIZE)
    assert request.block_hashes == [block_0]
    request.output_token_ids.append(31)
    HASHER.extend(request, BLOCK_SIZE)
    assert request.block_hashes == [block_0, HASHER.hash_block(block_0, SECOND, None)]


def test_index_answers_with_the_first_inserted_that_is_left():
    index = HashIndex()
    for block_id in (7, 3, 5):
        index.insert(NONE_HASH, block_id)
    assert (index.get(NONE_HASH), len(index), NONE_HASH in index) == (7, 1, True)
    index.remove(NONE_HASH, 7)
    assert index.get(NONE_HASH) == 3
    index.remove(NONE_HASH, 5)
    index.remove(NONE_HASH, 3)
    assert (index.get(NONE_HASH), len(index), NONE_HASH in index) == (None, 0, False)


# What a repeated prompt hits.
@pytest.mark.parametrize(
    ("num_cached", "num_tokens", "hit"),
    [(100, 100, 96), (112, 112, 96), (112, 113, 112), (15, 15, 0), (16, 16, 0), (17, 17, 16)],
)
def test_hit_is_whole_blocks_and_leaves_a_token_to_compute(num_cached, num_tokens, hit):
    scheduler = make_scheduler(BlockPool(100, BLOCK_SIZE))
    run(scheduler, make_request("a", range(num_cached)))
    repeat = make_request("b", range(num_tokens))
    run(scheduler, repeat)
    assert repeat.num_cached_tokens == hit
    assert scheduler.take_prefix_stats() == PrefixStats(num_cached + num_tokens, hit)


def test_different_salts_share_nothing():
    scheduler = make_scheduler(BlockPool(100, BLOCK_SIZE))
    hits = []
    for i, salt in enumerate([None, "a", "b", "a", None]):
        request = make_request(str(i), range(100), cache_salt=salt)
        run(scheduler, request)
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 0, 96, 96]


def test_without_caching_nothing_hits_and_nothing_is_counted():
    scheduler = make_scheduler(BlockPool(100, BLOCK_SIZE, enable_caching=False))
    for request_id in "ab":
        request = make_request(request_id, range(100))
        run(scheduler, request)
        assert request.num_cached_tokens == 0
        assert request.block_hashes == []
    assert scheduler.take_prefix_stats() == PrefixStats(0, 0)


def test_generated_tokens_are_cached_too():
    scheduler = make_scheduler(BlockPool(100, BLOCK_SIZE))
    first = make_request("a", range(20), max_tokens=30)
    run(scheduler, first)
    conversation = [*range(20), *first.output_token_ids, 1, 2, 3]
    second = make_request("b", conversation)
    run(scheduler, second)
    # 20 + 30 tokens, of which the last was sampled and never computed: three full blocks.
    assert second.num_cached_tokens == 48


def test_equal_prompts_share_blocks_within_one_step():
    pool = BlockPool(100, BLOCK_SIZE)
    scheduler = make_scheduler(pool)
    first, second = make_request("a", range(100)), make_request("b", range(100))
    scheduler.add(first)
    scheduler.add(second)
    output = scheduler.schedule()
    assert [(s.request.request_id, s.start, s.num_tokens) for s in output.scheduled] == [
        ("a", 0, 100),
        ("b", 96, 4),
    ]
    assert first.block_ids == [1, 2, 3, 4, 5, 6, 7]
    assert second.block_ids == [1, 2, 3, 4, 5, 6, 8]
    assert [pool.ref_count(block_id) for block_id in range(1, 9)] == [2, 2, 2, 2, 2, 2, 1, 1]


def test_reset_waits_for_the_running_request():
    pool = BlockPool(100, BLOCK_SIZE)
    scheduler = make_scheduler(pool)
    scheduler.add(make_request("a", range(100), max_tokens=2))
    output = scheduler.schedule()
    assert not pool.reset_prefix_cache()
    while scheduler.num_unfinished:
        scheduler.update(output, ModelRunnerOutput(np.zeros(1, np.int32)))
        output = scheduler.schedule()
    assert pool.reset_prefix_cache()
    repeat = make_request("b", range(100))
    run(scheduler, repeat)
    assert repeat.num_cached_tokens == 0


def test_admission_reserves_the_whole_sequence_only_if_asked():
    pool = BlockPool(5, BLOCK_SIZE)
    manager = KVManager(pool)
    request = make_request("a", range(80))
    assert not manager.admit(request, 16)
    assert (request.block_ids, pool.num_free) == ([], 4)
    assert manager.admit(request, 16, full_sequence_must_fit=False)
    assert request.block_ids == [1]


def test_hit_on_free_blocks_counts_against_the_free_ones():
    pool = BlockPool(5, BLOCK_SIZE)
    scheduler = make_scheduler(pool)
    run(scheduler, make_request("a", range(33)))
    holder = make_request("b", range(100, 116))
    manager = KVManager(pool)
    assert manager.admit(holder, 16)
    # Two cached blocks are free and one is empty: 48 + 1 tokens would need two empty ones.
    longer = make_request("c", range(49))
    manager.extend_hashes(longer)
    hit = manager.find_hit(longer)
    assert hit.num_blocks == 2
    assert not manager.admit(longer, 17, hit)
    assert [pool.ref_count(block_id) for block_id in hit.block_ids] == [0, 0]


# The order of reuse, seen from outside.
def test_tails_are_evicted_before_heads_and_empty_blocks_before_both():
    pool = BlockPool(11, BLOCK_SIZE)
    scheduler = make_scheduler(pool)
    prompt_a, prompt_b = range(40), range(1000, 1050)
    expected = [
        (prompt_a, 0, [1, 2, 3], [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]),
        (prompt_b, 0, [3, 4, 5, 6], [6, 7, 8, 9, 10, 2, 1, 5, 4, 3]),
        (prompt_a, 32, [1, 2, 6], [6, 7, 8, 9, 10, 5, 4, 3, 2, 1]),
        (prompt_a[:32], 16, [1, 6], [7, 8, 9, 10, 5, 4, 3, 2, 6, 1]),
    ]
    for i, (prompt, hit, block_ids, free_order) in enumerate(expected):
        request = make_request(str(i), prompt)
        assert run(scheduler, request) == block_ids
        assert request.num_cached_tokens == hit
        assert pool.free_order() == free_order
    # The last one computed its second block anew: two blocks carry the same content.
    assert pool.block_hash(2) == pool.block_hash(6)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reversed_hits"),
    [
        (5033, 1, [5024] * 4 + [1392] + [0] * 5),
        (5033, 16, [5024] * 4 + [1264] + [0] * 5),
        (5033, 64, [5024] * 4 + [880] + [0] * 5),
        (5011, 1, [5008] * 4 + [1456] + [0] * 5),
    ],
)
def test_cyclic_documents_hit_only_in_reversed_order(num_tokens, max_tokens, reversed_hits):
    """Ten documents in a cache for four; sums 21,488, 21,360, 20,976 and 21,488."""
    scheduler = make_scheduler(BlockPool(1345, BLOCK_SIZE))
    draw = random.Random(0)
    documents = [draw.choices(range(50_000), k=num_tokens) for _ in range(10)]

    def run_pass(name, order):
        requests = [make_request(f"{name}{i}", documents[i], max_tokens) for i in order]
        for request in requests:
            run(scheduler, request)
        assert scheduler.take_prefix_stats().hits == sum(r.num_cached_tokens for r in requests)
        return [request.num_cached_tokens for request in requests]

    assert sum(run_pass("first", range(10))) == 0
    assert sum(run_pass("second", range(10))) == 0
    assert run_pass("reversed", reversed(range(10))) == reversed_hits
