"""What contradicts itself is refused when the settings are made."""

import math

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.config import EngineConfig
from paged.scheduler.kv_manager import KVManager
from paged.scheduler.restoring import Restorer
from tests.scheduler.fake_device import FakeTiers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is unknown; choose one of fcfs"),
        ({"prefix_cache_policy": "rrip"}, "prefix_cache_policy='rrip' is unknown; choose one of"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo='md5' is unknown"),
        ({"long_prefill_token_threshold": -1}, "threshold=-1 must be at least 0"),
        ({"kv_offloading_size": -1.0}, "kv_offloading_size=-1.0 must be a number of GiB"),
        ({"kv_offloading_size": math.nan}, "kv_offloading_size=nan must be a number of GiB"),
        ({"kv_offloading_path": "/kv"}, "kv_offloading_path='/kv' needs kv_offloading_size"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_disk_size": 1.0},
            "kv_offloading_disk_size says how much of kv_offloading_path may be used",
        ),
        (
            {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
            "kv_offloading_size needs enable_prefix_caching",
        ),
    ],
)
def test_contradiction_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_tiers_refuse_models_with_several_cache_groups():
    pool = BlockPool(10, 4)
    kv = KVManager(pool, windows=(None, 8))
    with pytest.raises(ValueError, match="turn kv_offloading_size off, or set disable_hybrid"):
        Restorer(kv, pool, FakeTiers(1, [0], [0], 1))
