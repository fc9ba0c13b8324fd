"""The cyclic experiment through the real engine: ten documents that do not fit, three times over.

Run by hand (five to ten minutes): pytest -m slow tests/e2e/test_lru_collapse.py
"""

import random

import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams

NUM_TOKENS = 5033
ORDERS = (range(10), range(10), range(9, -1, -1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("lru", [0, 0, 21_488], id="lru"),
        pytest.param("lookahead", [0, 21_488, 21_488], id="lookahead"),
    ],
)
def test_hit_tokens_of_three_passes(demo_model_path, policy, expected):
    loaded = load_engine(
        str(demo_model_path),
        EngineConfig(
            dtype="bfloat16",
            max_model_len=5040,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            block_size=16,
            num_gpu_blocks_override=1345,
            prefix_cache_policy=policy,
        ),
        progress=False,
    )
    engine = loaded.engine
    rng = random.Random(0)
    documents = [[rng.randrange(100, 40_000) for _ in range(NUM_TOKENS)] for _ in range(10)]
    visits = [(number, i) for number, order in enumerate(ORDERS) for i in order]
    hits = [0, 0, 0]
    # One runs at a time; the others are queued only where the policy may look at the queue.
    num_queued = 9 if policy == "lookahead" else 1
    engine.scheduler.max_num_seqs = 1
    sent = 0
    while sent < len(visits) or engine.has_unfinished:
        while sent < len(visits) and engine.num_unfinished < num_queued:
            number, i = visits[sent]
            params = SamplingParams(temperature=0, max_tokens=1)
            engine.add_request(f"{number} {sent}", documents[i], params)
            sent += 1
        for output in engine.step()[0]:
            hits[int(output.request_id.split()[0])] += output.num_cached_tokens
    engine.close()
    assert hits == expected
