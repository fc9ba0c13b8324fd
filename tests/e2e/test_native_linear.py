"""The demo model's greedy texts equal the goldens with native linear layers."""

from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from tests.e2e.test_golden_smollm2 import check_all, run


def test_golden_texts(native, demo_model_path, smollm_golden):
    config = EngineConfig(
        dtype="float32",
        linear_backend="native",
        max_model_len=1536,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=512,
        compilation_cache_dir=None,
    )
    loaded = load_engine(str(demo_model_path), config, progress=False)
    try:
        assert loaded.config.linear_backend == "native"
        check_all(run(loaded.engine, smollm_golden["prompts"]), smollm_golden["prompts"])
    finally:
        loaded.engine.close()
