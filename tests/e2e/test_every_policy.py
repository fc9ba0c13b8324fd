"""Whatever decides what is evicted, saved, restored or planned ahead, the texts are the same.

The demo model in float32 on a pool so small that its requests preempt each other all the time,
twice over the same prompts, so that the second round finds what the first has left: on the device,
in host memory or on the disk.
"""

import pytest

from paged.scheduler.eviction.policies import POLICIES
from paged.scheduler.params import SamplingParams
from paged.scheduler.tiers.disk import DiskTier
from paged.scheduler.tiers.host import HostTier
from paged.scheduler.tiers.manager import TierManager
from tests.e2e.golden import check_greedy, prompt_ids

NAMES = ("numbers", "digits_contractions", "code_python", "japanese", "scripts", "emoji")
NUM_TOKENS = 36
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def run_twice(engine, prompts, tiers: TierManager | None = None) -> dict[str, int]:
    """Check both rounds against the goldens; return sums of the steps' figures.

    With `tiers` another request takes the whole pool between the rounds, so that the second one
    finds many blocks below; and there each step waits until what is on its way has arrived: where
    a block is found must not depend on how quickly a thread gets its turn.
    """
    sums = {"preempted": 0, "device": 0, "host": 0, "disk": 0}
    for number in range(2):
        if tiers is not None and number == 1:
            take_the_pool(engine)
        for prompt in prompts:
            engine.add_request(f"{number} {prompt['name']}", prompt_ids(prompt), GREEDY)
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
        for prompt in prompts:
            got = tokens[f"{number} {prompt['name']}"]
            check_greedy(prompt["name"], got, prompt["steps"][:NUM_TOKENS])
    scheduler = engine.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    return sums


def take_the_pool(engine) -> None:
    engine.add_request("all blocks", list(range(1000, 1390)), SamplingParams(max_tokens=1))
    while engine.has_unfinished:
        engine.step()


@pytest.fixture
def prompts(smollm_golden):
    return [prompt for prompt in smollm_golden["prompts"] if prompt["name"] in NAMES]


def small_pool(make_engine, **settings):
    # 25 usable blocks: the prompts take 24, and with their outputs 37.
    return make_engine(
        num_blocks=26, token_budget=128, max_model_len=400, enable_prefix_caching=True, **settings
    )


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_eviction_policy(make_engine, prompts, eviction):
    # Half of them planned ahead, half not: the two meet in the tests below, too.
    is_async = POLICIES.index(eviction) % 2 == 0
    sums = run_twice(small_pool(make_engine, eviction=eviction, async_scheduling=is_async), prompts)
    assert sums["preempted"] > 0


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_host_and_disk(make_engine, prompts, tmp_path, async_scheduling, policy):
    made: list[TierManager] = []

    def make_tiers(transfer):
        block_bytes = transfer.block_bytes
        disk = DiskTier(
            tmp_path, namespace="test", block_bytes=block_bytes, capacity_bytes=100 * block_bytes
        )
        made.append(TierManager(transfer, host=HostTier(5 * block_bytes, block_bytes), disk=disk))
        return made[0]

    engine = small_pool(
        make_engine, async_scheduling=async_scheduling, policy=policy, make_tiers=make_tiers
    )
    sums = run_twice(engine, prompts, *made)
    assert sums["preempted"] > 0
    assert sums["host"] > 0
    assert sums["disk"] >= 64


def test_prefills_in_small_parts(make_engine, prompts):
    engine = small_pool(make_engine, long_prefill_token_threshold=24, max_num_partial_prefills=2)
    assert run_twice(engine, prompts)["preempted"] > 0
