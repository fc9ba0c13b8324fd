"""Mixtures of experts through the whole engine: mixed batches, chunks, prefix hits, windows."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from paged import LLM, SamplingParams


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "qwen3_moe"])
def test_greedy_tokens_equal_the_golden_also_from_cached_prefixes(
    data_dir: Path, tmp_path: Path, tiny_config, name: str
):
    golden = data_dir / "golden" / "tiny"
    for source in (golden / name, golden / "tokenizer"):
        for file in source.iterdir():
            if file.name != "expected.json":
                shutil.copy(file, tmp_path / file.name)
    cases = json.loads((golden / name / "expected.json").read_text())["cases"]
    # Two shapes of a step; the longer prompt takes two of them.
    config = dataclasses.replace(tiny_config, max_num_seqs=8, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(tmp_path), config=config, progress=False) as llm:
        for is_cached in (False, True):
            prompts = [case["prompt_ids"] for case in cases]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for case, output in zip(cases, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == case["greedy_ids"]
            if is_cached:
                assert max(output.num_cached_tokens for output in outputs) > 0
