"""Whatever decides what is evicted, saved, restored or planned ahead, the tokens are the same.

The tiny llama in float32 on a pool so small that its requests preempt each other all the time,
twice over the same prompts, so that the second round finds what the first has left: on the device,
in host memory or on the disk. A decoder in numpy, without a cache, says which tokens are right.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import paged.models
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.eviction.policies import POLICIES
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.params import SamplingParams
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from tests.e2e.conftest import EngineMaker
from tests.models.dense import dense_logits

NUM_TOKENS = 36
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[3 + (7 * i + 5 * k) % 250 for k in range(57 + i)] for i in range(6)]

type Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def likeliest(tiny_model: Path) -> Callable[[Tokens, Tokens], Tokens]:
    """Return a function from prompt and output to what is likeliest in each place of the output."""
    _, params, config = paged.models.load(tiny_model, dtype="float32", progress=False)

    @functools.cache
    def continued(prompt: Tokens, output: Tokens) -> Tokens:
        logits = dense_logits(config, params, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        second, first = np.sort(logits, axis=1)[:, -2:].T
        assert (first - second).min() > 1e-3  # else float32 might choose otherwise
        return tuple(logits.argmax(axis=1).tolist())

    return continued


@pytest.fixture(scope="module")
def loaded(tiny_model: Path, tiny_config: EngineConfig) -> Iterator[LoadedEngine]:
    # So that the runner can move blocks; its own tiers are not used.
    config = dataclasses.replace(tiny_config, kv_offloading_size=0.01)
    loaded = load_engine(str(tiny_model), config, progress=False)
    yield loaded
    loaded.engine.close()


@pytest.fixture
def small_pool(loaded: LoadedEngine) -> Iterator[Callable[..., Engine]]:
    """Return engines with 50 usable blocks: the prompts take 48, and with their outputs 74."""
    make = EngineMaker(loaded)
    yield functools.partial(make, num_blocks=51, enable_prefix_caching=True)
    make.close()


def run_twice(engine: Engine, likeliest, tiers: TierManager | None = None) -> dict[str, int]:
    """Check the tokens of both rounds; return sums of the steps' figures.

    With `tiers` other requests take the whole pool between the rounds, so that the second one
    finds many blocks below; and there each step waits until what is on its way has arrived: where
    a block is found must not depend on how quickly a thread gets its turn.
    """
    sums = {"preempted": 0, "device": 0, "host": 0, "disk": 0}
    for number in range(2):
        if tiers is not None and number == 1:
            take_the_pool(engine)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{number} {i}", prompt, GREEDY)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished:
            if tiers is not None and number == 1:
                tiers.flush()
            outputs, stats = engine.step()
            sums["preempted"] += stats.num_preempted
            sums["device"] += stats.prefix_hits
            for medium, num_tokens in stats.external_prefix_hits.items():
                sums[medium] += num_tokens
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        for i, prompt in enumerate(PROMPTS):
            got = tuple(tokens[f"{number} {i}"])
            assert len(got) == NUM_TOKENS
            assert got == likeliest(tuple(prompt), got)
    scheduler = engine.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    return sums


def take_the_pool(engine: Engine) -> None:
    half = list(range(5, 200))  # 25 blocks
    for name, prompt in (("half", half), ("other half", half[::-1])):
        engine.add_request(name, prompt, SamplingParams(max_tokens=1))
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_eviction_policy(small_pool, likeliest, eviction):
    # Half of them planned ahead, half not: the two meet in the tests below, too.
    is_async = POLICIES.index(eviction) % 2 == 0
    sums = run_twice(small_pool(eviction=eviction, async_scheduling=is_async), likeliest)
    assert sums["preempted"] > 0


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_host_and_disk(small_pool, likeliest, tmp_path, async_scheduling, policy):
    made: list[TierManager] = []

    def make_tiers(transfer):
        block_bytes = transfer.block_bytes
        disk = DiskTier(
            tmp_path, namespace="test", block_bytes=block_bytes, capacity_bytes=100 * block_bytes
        )
        made.append(TierManager(transfer, host=HostTier(5 * block_bytes, block_bytes), disk=disk))
        return made[0]

    engine = small_pool(async_scheduling=async_scheduling, policy=policy, make_tiers=make_tiers)
    sums = run_twice(engine, likeliest, *made)
    assert sums["preempted"] > 0
    assert sums["host"] > 0
    assert sums["disk"] >= 64


def test_prefills_in_small_parts(small_pool, likeliest):
    engine = small_pool(long_prefill_token_threshold=24, max_num_partial_prefills=2)
    assert run_twice(engine, likeliest)["preempted"] > 0
