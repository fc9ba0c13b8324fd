"""The reference's metrics by name: each is on the page, or docs/serving.md says that it is not."""

import re

import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.tiers.figures import MediumStats, TierStats
from paged.server.app import make_app
from paged.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.process import ROOT
from tests.server.serving import Client, with_server

MEDIUM = MediumStats(
    num_blocks=0, num_bytes=0, capacity_bytes=64, num_hits=0, num_stores=0, num_failures=0
)
TIERS = TierStats(
    block_bytes=32,
    media={"host": MEDIUM, "disk": MEDIUM},
    num_saving=0,
    num_loading=0,
    num_saves_dropped=0,
    num_saves_failed=0,
    num_load_blocks_failed=0,
    num_loads_cancelled=0,
)

# vLLM 0.32: v1/metrics/loggers.py, v1/metrics/perf.py, v1/kv_offload; and the instrumentator of
# FastAPI. Families, with `_total` where the page has it.
ALWAYS = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state
    kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
    external_prefix_cache_queries_total external_prefix_cache_hits_total num_preemptions_total
    prompt_tokens_total generation_tokens_total prompt_tokens_by_source_total
    prompt_tokens_cached_total request_success_total admission_rejections_total
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_params_max_tokens request_prefill_kv_computed_tokens iteration_tokens_total
    request_params_n time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_num_preemptions cache_config_info
"""
ON_DEMAND = {
    "kv_cache_metrics": """
        kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds
    """,
    "enable_mfu_metrics": """
        estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total
        estimated_write_bytes_per_gpu_total
    """,
    "kv_offloading_size": """
        num_requests_kv_fetch_by_stage kv_offload_load_bytes_total kv_offload_load_time_total
        kv_offload_load_size kv_offload_store_bytes_total kv_offload_store_time_total
        kv_offload_store_size kv_offload_lookup_sync_delay_seconds
        kv_offload_allocation_failure_total kv_offload_cpu_cache_usage_perc
        kv_offload_cpu_cache_read_usage_perc kv_offload_cpu_cache_write_usage_perc
        kv_offload_cpu_allocation_size kv_offload_tiering_chunk_queries_total
        kv_offload_tiering_chunk_hits_total kv_offload_tiering_read_bytes_total
        kv_offload_tiering_read_time_total kv_offload_tiering_write_bytes_total
        kv_offload_tiering_write_time_total kv_offload_tiering_promotion_job_failures_total
        kv_offload_tiering_cascade_job_failures_total
    """,
}
HTTP = """
    http_requests_total http_request_duration_seconds http_request_size_bytes
    http_response_size_bytes http_request_duration_highr_seconds
"""
NOT_HERE = """
    mm_cache_ corrupted_requests spec_decode_ kv_offload_lookup_async_delay_seconds
    kv_offload_stores_skipped kv_offload_tiering_lookup_ kv_offload_tiering_active_ nixl_
"""


def families(**config) -> dict[str, str]:
    """Type by name of what a page shows after a request."""
    engine = FakeEngine(config=EngineConfig(**config), tiers=TIERS)
    app = make_app(engine, ServerSettings())

    async def test(client: Client) -> str:
        await (await client.get("/v1/models")).read()
        return await (await client.get("/metrics")).text()

    text = with_server(test, app=app)
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def test_names_that_are_always_there():
    missing = [name for name in ALWAYS.split() if f"vllm:{name}" not in families()]
    missing += [name for name in HTTP.split() if name not in families()]
    assert not missing


@pytest.mark.parametrize("setting", ON_DEMAND)
def test_names_that_a_setting_adds(setting):
    added = families(**{setting: True}).keys() - families().keys()
    assert added == {f"vllm:{name}" for name in ON_DEMAND[setting].split()}


def test_what_is_missing_is_documented():
    text = (ROOT / "docs" / "serving.md").read_text()
    missing = [name for name in NOT_HERE.split() if f"`vllm:{name}" not in text]
    undocumented = [
        name for names in ON_DEMAND.values() for name in names.split() if name not in text
    ]
    assert not missing
    assert not undocumented
