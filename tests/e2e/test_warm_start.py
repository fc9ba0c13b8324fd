"""A second start finds its programs on disk, and gives the same tokens."""

import dataclasses
from pathlib import Path

from paged.models.compilation import CompilationCounter
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import load_engine
from paged.scheduler.params import SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "random": SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True),
}


def start_and_generate(model: Path, config: EngineConfig) -> tuple[dict[str, list[int]], int]:
    """Load an engine; return what it generates, and how many programs were compiled for it."""
    with CompilationCounter() as counter:
        engine = load_engine(str(model), config, progress=False).engine
        for name, params in PARAMS.items():
            engine.add_request(name, list(range(40, 75)), params)
        tokens: dict[str, list[int]] = {name: [] for name in PARAMS}
        while engine.has_unfinished:
            for output in engine.step()[0]:
                tokens[output.request_id] += output.outputs[0].token_ids
    engine.close()
    return tokens, counter.count


def test_a_second_start_compiles_no_step(
    native: None, tiny_model: Path, tiny_config: EngineConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        tiny_config,
        compilation_cache_dir=str(tmp_path),
        linear_backend="native",
        max_num_seqs=8,
        max_num_batched_tokens=8,
    )
    first, num_cold = start_and_generate(tiny_model, config)
    files = [file for file in (tmp_path / "executables").rglob("*") if file.is_file()]
    second, num_warm = start_and_generate(tiny_model, config)
    assert second == first
    assert all(len(tokens) == 8 for tokens in first.values())
    # What is left are the few small programs that are no step.
    assert num_cold >= len(files) + num_warm
    assert num_warm < 10

    damaged = min(files, key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:1000])
    third, num_repaired = start_and_generate(tiny_model, config)
    assert third == first
    assert num_repaired > num_warm
