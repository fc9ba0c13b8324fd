"""The demo model's greedy texts equal the goldens without the native kernels, too.

In prompt chunks of at most 64 tokens and with so few blocks that requests are preempted.
"""

from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from tests.e2e.golden import prompt_ids
from tests.e2e.test_golden_smollm2 import check_all, run


def test_golden_texts_in_chunks_and_with_preemption(demo_model_path, smollm_golden):
    config = EngineConfig(
        dtype="float32",
        attention_backend="xla",
        linear_backend="xla",
        max_model_len=1536,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=98,
        enable_prefix_caching=False,
        compilation_cache_dir=None,
    )
    loaded = load_engine(str(demo_model_path), config, progress=False)
    try:
        # Beside the longest there is room for seven short prompts, but not for what they become.
        *others, longest = sorted(smollm_golden["prompts"], key=lambda p: len(prompt_ids(p)))
        prompts = [longest, *others]
        result = run(loaded.engine, prompts)
        check_all(result, prompts)
        assert result["num_preempted"] > 0
    finally:
        loaded.engine.close()
