"""A model of full and sliding-window layers: its own blocks by group, or all of them kept."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams
from tests.e2e.conftest import EngineMaker

WINDOW = 16
PROMPTS = [[3 + (11 * i + 3 * k) % 250 for k in range(90 + 7 * i)] for i in range(5)]


@pytest.fixture
def hybrid_model(data_dir: Path, tmp_path: Path) -> Path:
    """The tiny Qwen2 with its window turned on for the second layer."""
    golden = data_dir / "golden" / "tiny"
    folder = tmp_path / "hybrid"
    folder.mkdir()
    for source in (golden / "qwen2_yarn", golden / "tokenizer"):
        for file in source.iterdir():
            if file.name != "expected.json":
                shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serve_twice(engine) -> tuple[dict[str, list[int]], int]:
    """Serve all prompts at once, two times; return outputs and cached tokens."""
    tokens: dict[str, list[int]] = {}
    num_cached = 0
    for number in range(2):
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            engine.add_request(f"{number} {i}", prompt, params)
        while engine.has_unfinished:
            outputs, stats = engine.step()
            num_cached += stats.prefix_hits
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    return tokens, num_cached


def test_outputs_are_those_of_keeping_every_block(hybrid_model, tiny_config):
    results = {}
    for is_hybrid in (True, False):
        config = dataclasses.replace(
            tiny_config,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=300,
            disable_hybrid_kv_cache_manager=not is_hybrid,
        )
        loaded = load_engine(str(hybrid_model), config, progress=False)
        windows = loaded.engine.scheduler._kv._windows
        assert len(windows) == (2 if is_hybrid else 1)
        # The same programs, and a pool that is too small for all requests.
        crowded = EngineMaker(loaded)(num_blocks=60, enable_prefix_caching=True, windows=windows)
        for engine in (loaded.engine, crowded):
            num_free = engine.scheduler.pool.num_free
            results[num_free + 1, is_hybrid] = serve_twice(engine)
            assert engine.scheduler.pool.num_free == num_free
        loaded.engine.close()
    assert set(results) == {(300, True), (60, True), (300, False), (60, False)}
    outputs = [tokens for tokens, _ in results.values()]
    assert all(tokens == outputs[0] for tokens in outputs)
    assert results[300, True][1] > 0
