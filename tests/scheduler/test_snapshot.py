"""What is seen of an engine: counted here block by block, and looked at while it works."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.errors import EngineDeadError
from paged.scheduler.loading import LoadedEngine
from paged.scheduler.params import SamplingParams
from paged.scheduler.snapshot import MAX_REQUESTS, EngineSnapshot, block_cells
from tests.scheduler.fakes import make_engine, spell
from tests.scheduler.tap import Tap


def snapshot_of(ref_counts, keys) -> EngineSnapshot:
    return EngineSnapshot(
        block_size=16,
        ref_counts=[0, *ref_counts],
        keys=[None, *keys],
        num_running=0,
        num_waiting=0,
        requests=(),
    )


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("max_cells", [1, 8, 1000])
def test_cells_are_what_counting_block_by_block_gives(num_blocks, max_cells):
    rng = random.Random(num_blocks)
    blocks = [(rng.choice([0, 0, 1, 2, 5]), rng.choice([None, b"x"])) for _ in range(num_blocks)]
    seen = block_cells(
        snapshot_of(*zip(*blocks, strict=True)) if blocks else snapshot_of([], []), max_cells
    )

    size = seen.blocks_per_cell
    parts = [blocks[start : start + size] for start in range(0, num_blocks, size)]
    assert len(parts) <= max_cells
    assert size == 1 or num_blocks > max_cells * (size - 1), "no coarser than it must be"
    assert seen.held == [sum(1 for count, _ in part if count) for part in parts]
    assert seen.cached == [sum(1 for count, key in part if key and not count) for part in parts]
    assert seen.holders == [max(count for count, _ in part) for part in parts]
    assert seen.num_free == sum(1 for count, key in blocks if not count and not key)
    assert seen.num_cached == sum(seen.cached)
    assert seen.num_used == sum(1 for count, _ in blocks if count == 1)
    assert seen.num_shared == sum(1 for count, _ in blocks if count > 1)


def test_there_must_be_a_cell():
    with pytest.raises(ValueError, match="max_cells=0 must be at least 1"):
        block_cells(snapshot_of([0], [None]), 0)


def test_blocks_go_from_free_to_shared_to_cached():
    engine = make_engine(spell("x" * 40), block_size=4, num_blocks=65)
    assert block_cells(engine.snapshot(), 4096).num_free == 64
    for name in "abc":
        engine.add_request(name, tuple(range(65, 81)), SamplingParams(max_tokens=10))
    engine.step()
    cells = block_cells(engine.snapshot(), 4096)
    # All but the last block of the prompt are one, and each request has a block of its own.
    assert cells.num_shared == 3
    assert max(cells.holders) == 3
    assert cells.num_used >= 3
    while engine.has_unfinished:
        engine.step()
    cells = block_cells(engine.snapshot(), 4096)
    assert (cells.num_used, cells.num_shared) == (0, 0)
    assert cells.num_cached > 3
    assert cells.num_cached + cells.num_free == 64


def test_running_requests_come_first_and_the_number_is_bounded():
    engine = make_engine(spell("x" * 40), max_num_seqs=2, num_blocks=65)
    for i in range(MAX_REQUESTS + 10):
        engine.add_request(str(i), (65, 66, 67), SamplingParams(max_tokens=20))
    engine.step()
    seen = engine.snapshot()
    assert [request.request_id for request in seen.requests[:3]] == ["0", "1", "2"]
    assert [request.status for request in seen.requests[:3]] == ["running", "running", "waiting"]
    assert len(seen.requests) == MAX_REQUESTS
    assert (seen.num_running, seen.num_waiting) == (2, MAX_REQUESTS + 8)
    first = seen.requests[0]
    assert (first.num_prompt_tokens, first.num_tokens, first.max_num_tokens) == (3, 4, 23)
    assert (first.num_computed_tokens, first.num_blocks) == (3, 1)
    assert seen.requests[2].num_cached_tokens == 0


def serve(scenario, script=None):
    async def main():
        loaded = LoadedEngine(
            engine=make_engine(script or spell("y")),
            checkpoint=SimpleNamespace(name="fake"),
            config=EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32),
            max_model_len=128,
            cache_info={},
        )
        engine = AsyncEngine(loaded)
        engine.start()
        try:
            await scenario(engine)
        finally:
            if isinstance(script, Tap):
                script.open()
            await engine.shutdown()

    asyncio.run(main())


def test_an_engine_can_be_looked_at_idle_and_busy():
    async def scenario(engine):
        assert (await engine.snapshot()).requests == ()
        stream = engine.generate([65, 66], SamplingParams(max_tokens=100), request_id="mine")
        await anext(stream)
        seen = await tap.open_after(engine.snapshot())
        assert [request.request_id for request in seen.requests] == ["mine"]
        assert sum(seen.ref_counts) >= 1
        await stream.aclose()

    tap = Tap()
    serve(scenario, tap)


def test_a_dead_engine_cannot_be_looked_at():
    async def scenario(engine):
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.snapshot()

    serve(scenario)
