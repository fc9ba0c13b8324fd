"""What a request leaves in the prefix cache, and what makes the cache forget."""

import logging

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.cache_events import AllBlocksCleared, BlockRemoved, BlockStored
from paged.scheduler.params import SamplingParams
from paged.scheduler.pins import PIN_SECONDS
from paged.scheduler.prefix_cache import NONE_HASH, PrefixHasher
from paged.scheduler.request import CacheMode, MultimodalItem, Request
from paged.scheduler.scheduler import Scheduler
from tests.scheduler.stepping import BLOCK_SIZE, add, deliver, step

CHAT = tuple(range(1000, 1100))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(num_blocks=21, clock=None, **settings) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 160}
    return Scheduler(
        pool=BlockPool(num_blocks, BLOCK_SIZE), clock=clock or Clock(), **limits | settings
    )


def serve(scheduler: Scheduler, prompt, mode=CacheMode.DEFAULT, **settings) -> int:
    """Serve one request alone; return its cached tokens."""
    request = Request("r", tuple(prompt), SamplingParams(), 1, cache_mode=mode, **settings)
    add(scheduler, request)
    while scheduler.num_unfinished:
        step(scheduler)
    return request.num_cached_tokens


def documents(count):
    return [range(10_000 * (i + 1), 10_000 * (i + 1) + 120) for i in range(count)]


def test_one_shot_documents_that_store_nothing_leave_a_chat_its_prefix():
    scheduler = make_scheduler()
    serve(scheduler, CHAT)
    for document in documents(32):
        assert serve(scheduler, document, CacheMode.NO_STORE) == 0
    assert serve(scheduler, CHAT) == 96
    for document in documents(32):
        serve(scheduler, document)
    assert serve(scheduler, CHAT) == 0


def test_request_that_stores_nothing_still_reads():
    scheduler = make_scheduler()
    serve(scheduler, CHAT)
    assert serve(scheduler, CHAT, CacheMode.NO_STORE) == 96


def test_pinned_prompt_survives_any_sweep_until_its_time_is_over():
    clock = Clock()
    scheduler = make_scheduler(clock=clock)
    serve(scheduler, CHAT, CacheMode.PIN)
    assert scheduler.pool.num_pinned == 6
    for document in documents(10):
        serve(scheduler, document)
    clock.now = PIN_SECONDS - 1
    assert serve(scheduler, CHAT, CacheMode.PIN) == 96  # prolongs it
    clock.now += PIN_SECONDS - 1
    for document in documents(10):
        serve(scheduler, document)
    assert serve(scheduler, CHAT) == 96
    clock.now += 2
    for document in documents(10):
        serve(scheduler, document)
    assert scheduler.pool.num_pinned == 0
    assert serve(scheduler, CHAT) == 0


def test_pins_leave_room_for_the_longest_request(caplog):
    scheduler = make_scheduler(num_blocks=17)  # 16 blocks; the longest request takes 10
    serve(scheduler, CHAT, CacheMode.PIN)
    assert scheduler.pool.num_pinned == 6
    with caplog.at_level(logging.WARNING):
        serve(scheduler, range(5000, 5040), CacheMode.PIN)
    assert scheduler.pool.num_pinned == 6
    assert "6 of at most 6 are pinned already" in caplog.text
    assert serve(scheduler, range(159)) == 0


def test_reset_drops_pins_and_refuses_while_a_request_runs():
    scheduler = make_scheduler()
    serve(scheduler, CHAT, CacheMode.PIN)
    running = Request("running", tuple(range(40)), SamplingParams(), 50)
    add(scheduler, running)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.pool.num_pinned == 6
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.pool.num_pinned == 0
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    assert running.num_preemptions == 1
    # Its output is kept, all of its KV is computed again.
    assert step(scheduler) == {"running": 41}
    scheduler.abort(["running"])
    assert serve(scheduler, CHAT) == 0


def test_new_weights_reach_no_old_block():
    scheduler = make_scheduler()
    serve(scheduler, CHAT)
    running = Request("running", CHAT, SamplingParams(), 50)
    waiting = Request("waiting", CHAT, SamplingParams(), 50)
    add(scheduler, running)
    step(scheduler)
    add(scheduler, waiting)
    old = list(waiting.block_hashes)
    scheduler.advance_weights_epoch()
    assert not set(waiting.block_hashes) & set(old)
    # The first computes everything anew; the second, in the same step, shares with it.
    assert step(scheduler) == {"running": 101, "waiting": 4}


def test_epoch_zero_leaves_the_root_as_the_reference_has_it():
    hasher = PrefixHasher()
    assert hasher.root == NONE_HASH
    assert PrefixHasher(epoch=0).root == NONE_HASH
    hasher.advance_epoch()
    assert hasher.epoch == 1
    assert hasher.root == PrefixHasher(epoch=1).root != NONE_HASH
    assert PrefixHasher(epoch=2).root != hasher.root


def test_salts_keep_tenants_apart_and_equal_salts_share():
    scheduler = make_scheduler(num_blocks=41)
    assert serve(scheduler, CHAT, cache_salt="a") == 0
    assert serve(scheduler, CHAT, cache_salt="b") == 0
    assert serve(scheduler, CHAT) == 0
    assert serve(scheduler, CHAT, cache_salt="a") == 96
    assert serve(scheduler, CHAT, cache_salt="b") == 96


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora": ("sql", "digest-1")}, {"lora": ("sql", "digest-2")}),
        ({"lora": ("sql", "d")}, {"lora": ("chat", "d")}),
        ({"lora": ("x", "x")}, {"cache_salt": "x"}),
        (
            {"mm_items": (MultimodalItem("cat", 3, 8),)},
            {"mm_items": (MultimodalItem("dog", 3, 8),)},
        ),
        (
            {"mm_items": (MultimodalItem("cat", 3, 8),)},
            {"mm_items": (MultimodalItem("cat", 4, 8),)},
        ),
    ],
)
def test_what_else_keys_and_values_depend_on_keeps_blocks_apart(one, other):
    scheduler = make_scheduler(num_blocks=41)
    assert serve(scheduler, CHAT, **one) == 0
    assert serve(scheduler, CHAT, **other) == 0
    assert serve(scheduler, CHAT, **one) == 96


def test_multimodal_item_touches_only_the_blocks_it_overlaps():
    item = MultimodalItem("cat", 20, 8)
    plain, image = (
        Request("r", CHAT, SamplingParams(), 1),
        Request("r", CHAT, SamplingParams(), 1, mm_items=(item,)),
    )
    for request in (plain, image):
        PrefixHasher().extend(request, BLOCK_SIZE)
    assert plain.block_hashes[0] == image.block_hashes[0]
    parent = plain.block_hashes[0]
    second = PrefixHasher().hash_block(parent, CHAT[16:32], (("mm", "cat", 4),))
    assert image.block_hashes[1] == second


def test_subscribers_hear_what_is_stored_removed_and_cleared():
    scheduler = make_scheduler(num_blocks=11)
    events = []
    unsubscribe = scheduler.pool.events.subscribe(events.append)
    request = Request("r", CHAT[:40], SamplingParams(), 30, cache_salt="t")
    add(scheduler, request)
    step(scheduler)
    first, second = request.block_hashes[:2]
    assert events == [
        BlockStored(
            block_hashes=(first, second),
            parent_block_hash=None,
            token_ids=CHAT[:32],
            block_size=BLOCK_SIZE,
            extra_keys=((("cache_salt", "t"),), None),
        )
    ]
    events.clear()
    while scheduler.num_unfinished:
        step(scheduler)
    tokens = tuple(request.tokens(0, 64))
    assert [(e.parent_block_hash, e.token_ids) for e in events] == [
        (second, tokens[32:48]),
        (request.block_hashes[2], tokens[48:64]),
    ]
    stored = list(request.block_hashes)
    events.clear()
    serve(scheduler, range(5000, 5140), CacheMode.NO_STORE)
    removed = [h for event in events for h in event.block_hashes]
    assert all(isinstance(event, BlockRemoved) for event in events)
    # Nine of ten blocks were needed: the tail of what was stored had to go.
    assert removed == stored[:0:-1]
    events.clear()
    assert scheduler.reset_prefix_cache()
    assert events == [AllBlocksCleared()]
    unsubscribe()
    serve(scheduler, CHAT)
    assert len(events) == 1


def test_random_prompts_under_preemption_hit_nothing():
    scheduler = make_scheduler(num_blocks=13)
    for i, document in enumerate(documents(6)):
        add(scheduler, Request(f"r{i}", tuple(document[:60]), SamplingParams(), 70))
    num_preempted = 0
    while scheduler.num_unfinished:
        output = scheduler.schedule()
        num_preempted += len(output.preempted)
        deliver(scheduler, output)
    assert num_preempted
    stats = scheduler.take_prefix_stats()
    assert (stats.queries, stats.hits) == (6 * 60, 0)


def test_unknown_hash_algorithm_is_refused():
    with pytest.raises(ValueError, match="'md5' is unknown; choose one of sha256_cbor, sha256"):
        PrefixHasher("md5")


def test_fast_hashes_need_their_package_and_a_root_of_their_own(caplog):
    xxhash = pytest.importorskip("xxhash")
    one, other = PrefixHasher("xxhash_cbor"), PrefixHasher("xxhash_cbor")
    assert len(one.root) == xxhash.xxh3_128(b"").digest_size
    assert one.root != other.root
    assert "not collision resistant" in caplog.text


def test_missing_hash_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(ValueError, match="needs the package xxhash; install it, or use"):
        PrefixHasher("xxhash")


def test_pickled_hashes_differ_from_canonical_ones():
    assert PrefixHasher("sha256").root != NONE_HASH
    assert len(PrefixHasher("sha256").root) == 32
