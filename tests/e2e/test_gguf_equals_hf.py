"""The demo model's GGUF file, and a Hugging Face directory written from it, are one model."""

from pathlib import Path

import pytest

from paged import LLM, SamplingParams
from tests.gguf_to_hf import write_hf_directory

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["The capital of France is", "def fib(n):\n", "日本の首都は"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def hf_directory(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2-hf")
    write_hf_directory(demo_model_path, directory)
    return directory


def test_same_prompts_same_tokens(demo_model_path, hf_directory, tmp_path):
    results = []
    for model in (demo_model_path, hf_directory):
        with LLM(
            str(model),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=128,
            compilation_cache_dir=str(tmp_path),  # the second model compiles nothing anew
            progress=False,
        ) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            outputs += llm.chat(CHAT, GREEDY, use_tqdm=False)
            results.append([(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs])
            texts = [output.outputs[0].text for output in outputs]
    assert results[0] == results[1]
    assert texts[0].startswith(" Paris")
