"""LoRA adapters through the engine: each request's tokens are those it has alone, or merged."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import paged.models
from paged import LLM, AsyncEngine, LoRARequest, SamplingParams
from paged.models.compilation import CompilationCounter
from paged.models.errors import AdapterNotFoundError
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.exporting import compile_artifact
from paged.scheduler.params import ParameterError
from tests.lora_files import linear_shapes, write_adapter
from tests.scheduler.fakes import make_engine, spell

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NAMES = ("llama", "llama_lora", "llama_lora_rs")


@pytest.fixture(scope="module")
def config(tiny_config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(
        tiny_config,
        max_num_seqs=8,
        max_num_batched_tokens=8,  # one shape of a step
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_cpu_loras=2,
    )


@pytest.fixture(scope="module", params=["xla", "native"])
def llm(request, tiny_model: Path, config: EngineConfig):
    if request.param == "native":
        request.getfixturevalue("native")
    config = dataclasses.replace(
        config, linear_backend=request.param, attention_backend=request.param
    )
    with LLM(str(tiny_model), config=config, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def tight(tiny_model: Path, config: EngineConfig):
    """Room for one adapter at a time on the device, and for less than three long requests."""
    config = dataclasses.replace(
        config, max_loras=1, max_cpu_loras=1, num_gpu_blocks_override=11, max_model_len=72
    )
    with LLM(str(tiny_model), config=config, progress=False) as llm:
        yield llm


def golden(data_dir: Path, name: str) -> tuple[LoRARequest | None, list[dict]]:
    folder = data_dir / "golden" / "tiny" / name
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return None if name == "llama" else LoRARequest(name, lora_path=str(folder)), cases


def generate(llm: LLM, prompts, loras, params=PARAMS) -> list[list[int]]:
    outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def mixed(data_dir: Path) -> tuple[list, list, list]:
    """Prompts, adapters and expected tokens of all goldens."""
    prompts, loras, expected = [], [], []
    for name in NAMES:
        lora, cases = golden(data_dir, name)
        for case in cases:
            prompts.append(case["prompt_ids"])
            loras.append(lora)
            expected.append(case["greedy_ids"])
    return prompts, loras, expected


def test_batches_of_several_adapters_give_the_reference_tokens(llm, data_dir):
    """Prompts enter in chunks; the second time they are cached, each under its own adapter."""
    prompts, loras, expected = mixed(data_dir)
    with CompilationCounter() as compilations:
        assert generate(llm, prompts, loras) == expected
        cached = llm.generate(prompts, PARAMS, lora_request=loras, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in cached] == expected
    assert {output.num_cached_tokens for output in cached} == {8, 32}
    assert compilations.count == 0


def test_an_equal_prompt_hits_only_what_the_same_content_has_computed(llm, data_dir, tmp_path):
    lora, cases = golden(data_dir, "llama_lora")
    other, _ = golden(data_dir, "llama_lora_rs")
    prompt = [*cases[1]["prompt_ids"], 77]
    folder = tmp_path / "adapter"
    shutil.copytree(lora.lora_path, folder)
    same = LoRARequest("changing", lora_path=str(folder))

    def cached(lora: LoRARequest | None) -> int:
        (output,) = llm.generate(prompt, PARAMS, lora_request=lora, use_tqdm=False)
        return output.num_cached_tokens

    llm.reset_prefix_cache()
    assert [cached(lora), cached(None), cached(other)] == [0, 0, 0]
    assert [cached(lora), cached(None), cached(other)] == [40, 40, 40]
    assert [cached(same), cached(same)] == [0, 40]
    # Other content under the same name and path, once it is read again.
    shutil.copytree(other.lora_path, folder, dirs_exist_ok=True)
    llm._engine.lora_store(same).add(same)
    assert [cached(same), cached(same)] == [0, 40]
    llm._engine.lora_store(same).remove("changing")


def test_samples_of_one_prompt_have_its_adapter(llm, data_dir):
    """Each sample is what a request of its own with that seed gets."""
    lora, (case, _) = golden(data_dir, "llama_lora_rs")
    prompt = case["prompt_ids"]
    params = SamplingParams(n=3, seed=5, top_k=20, max_tokens=12, ignore_eos=True)
    alone = [dataclasses.replace(params, n=1, seed=5 + index) for index in range(3)]
    expected = [generate(llm, [prompt], [lora], one)[0] for one in alone]
    assert generate(llm, [prompt], [lora], params) == expected
    assert generate(llm, [prompt], None, params) != expected


def test_adapters_stay_when_the_parameters_change(llm, data_dir, tiny_model):
    prompts, loras, expected = mixed(data_dir)
    _, params, _ = paged.models.load(tiny_model, dtype="float32", progress=False)
    llm.update_params(params)
    assert generate(llm, prompts, loras) == expected


def test_one_slot_for_three_adapters_under_preemption(tight, data_dir, tmp_path):
    """Slots, blocks and places in host memory are all too few; outputs are those of each alone."""
    shapes = linear_shapes(data_dir / "golden" / "tiny" / "llama")
    third = write_adapter(tmp_path / "third", shapes, rank=4, seed=3)
    loras = [None, *(golden(data_dir, name)[0] for name in NAMES[1:])]
    loras.append(LoRARequest("third", lora_path=str(third)))
    prompts = [[10 * i + j for j in range(24)] for i in range(3)]
    params = dataclasses.replace(PARAMS, max_tokens=40)
    pairs = [(prompt, lora) for prompt in prompts for lora in loras]
    alone = [generate(tight, [prompt], [lora], params)[0] for prompt, lora in pairs]
    assert len({tuple(tokens) for tokens in alone}) == len(pairs)
    tight.reset_prefix_cache()
    with CompilationCounter() as compilations:
        num_preempted, together = run(tight._engine, pairs, params)
    assert together == alone
    assert num_preempted
    assert compilations.count == 0


def run(engine: Engine, pairs, params) -> tuple[int, list[list[int]]]:
    """Return how many were preempted, and the tokens."""
    for index, (prompt, lora) in enumerate(pairs):
        engine.add_request(str(index), prompt, params, lora=lora)
    tokens: dict[str, list[int]] = {}
    num_preempted = 0
    while engine.has_unfinished:
        outputs, stats = engine.step()
        num_preempted += stats.num_preempted
        assert len(stats.running_loras) <= 1
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    return num_preempted, [tokens[str(index)] for index in range(len(pairs))]


def test_async_engine_lists_adapters_and_serves_them_at_once(tiny_model, config, data_dir):
    async def run() -> None:
        engine = await AsyncEngine.create(str(tiny_model), config, progress=False)
        try:
            loras = [golden(data_dir, name)[0] for name in NAMES[1:]]
            for lora in loras:
                await engine.add_lora(lora)
            assert engine.loras() == loras
            with pytest.raises(AdapterNotFoundError, match=r"has no adapter_config\.json"):
                await engine.add_lora(LoRARequest("x", lora_path="/nowhere"))
            seen: set[tuple[str, ...]] = set()
            engine.add_stats_listener(lambda stats: seen.add(stats.running_loras))

            async def tokens(prompt: list[int], lora: LoRARequest | None) -> list[int]:
                found: list[int] = []
                async for output in engine.generate(prompt, PARAMS, lora=lora):
                    found += output.outputs[0].token_ids
                return found

            prompts, adapters, expected = mixed(data_dir)
            pairs = zip(prompts, adapters, strict=True)
            assert await asyncio.gather(*(tokens(*pair) for pair in pairs)) == expected
            assert ("llama_lora", "llama_lora_rs") in seen
            assert engine.remove_lora("llama_lora")
            assert not engine.remove_lora("llama_lora")
            assert engine.loras() == loras[1:]
            with pytest.raises(AdapterNotFoundError, match="nowhere"):
                await tokens([1, 2], LoRARequest("x", lora_path="/nowhere"))
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_an_engine_without_adapters_says_so(data_dir):
    engine = make_engine(spell("no"))
    with pytest.raises(ParameterError, match="needs an engine with enable_lora"):
        engine.add_request("0", [5, 6], PARAMS, lora=golden(data_dir, "llama_lora")[0])


def test_each_prompt_needs_an_adapter_or_none(llm, data_dir):
    lora, _ = golden(data_dir, "llama_lora")
    with pytest.raises(ValueError, match="Got 2 lora_requests for 1 prompts"):
        llm.generate([5, 6], PARAMS, lora_request=[lora, None], use_tqdm=False)


def test_programs_with_adapters_are_not_exported(tiny_model, config, tmp_path):
    with pytest.raises(ValueError, match="programs with LoRA adapters are not exported"):
        compile_artifact(str(tiny_model), config, tmp_path / "artifact", progress=False)
