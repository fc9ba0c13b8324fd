"""New parameters in a running engine, and converted checkpoints, as users of the library do it."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import paged.models
from paged import LLM, SamplingParams
from paged.models.compilation import CompilationCounter
from paged.scheduler.config import EngineConfig
from paged.server.cli import main

PROMPTS = [[97, 98, 99], list(range(64, 94))]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=["xla", "native"])
def llm(request, tiny_model: Path, tiny_config: EngineConfig):
    if request.param == "native":
        request.getfixturevalue("native")
    # Few shapes, or those of the other tests, which are compiled already.
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 16} if request.param == "xla" else {}
    config = dataclasses.replace(
        tiny_config, linear_backend=request.param, attention_backend=request.param, **few
    )
    with LLM(str(tiny_model), config=config, progress=False) as llm:
        yield llm


def sample(llm: LLM) -> list[tuple[tuple[int, ...], list[float]]]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [
        (
            output.token_ids,
            [next(iter(position.values())).logprob for position in output.logprobs],
        )
        for output in outputs
    ]


def test_sampled_tokens_have_the_log_probabilities_that_training_computes(llm, tiny_model):
    """Before an update and after it; and nothing is compiled in between."""
    graphdef, params, _ = paged.models.load(tiny_model, dtype="float32", progress=False)
    for scale in (1.0, 0.5, 1.0):
        scaled = jax.tree.map(lambda leaf, s=scale: leaf * s, params)
        jax.block_until_ready(scaled)
        with CompilationCounter() as compilations:
            llm.update_params(scaled)
            samples = sample(llm)
        assert compilations.count == 0
        for prompt, (token_ids, logprobs) in zip(PROMPTS, samples, strict=True):
            ids = jax.numpy.asarray([[*prompt, *token_ids]], "int32")
            dense = paged.models.token_logprobs(graphdef, scaled, ids)[0, -len(token_ids) :]
            np.testing.assert_allclose(logprobs, dense, atol=1e-4)


def test_cached_prefixes_are_forgotten(llm, tiny_model):
    _, params, _ = paged.models.load(tiny_model, dtype="float32", progress=False)
    llm.generate(PROMPTS[1:], PARAMS, use_tqdm=False)
    (again,) = llm.generate(PROMPTS[1:], PARAMS, use_tqdm=False)
    assert again.num_cached_tokens > 0
    llm.update_params(params)
    (fresh,) = llm.generate(PROMPTS[1:], PARAMS, use_tqdm=False)
    assert fresh.num_cached_tokens == 0
    assert fresh.outputs[0].token_ids == again.outputs[0].token_ids


def test_parameters_of_another_dtype_are_refused_and_nothing_changes(llm, tiny_model):
    before = sample(llm)
    _, params, _ = paged.models.load(tiny_model, dtype="bfloat16", progress=False)
    with pytest.raises(ValueError, match=r"embed\.weight \[.*\] bfloat16 instead of .* float32"):
        llm.update_params(params)
    assert sample(llm) == before


def test_a_converted_checkpoint_gives_the_same_tokens(
    tiny_model, tiny_config, tmp_path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "converted"
    arguments = ["convert", str(tiny_model), "--out", str(out), "--dtype", "float32"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with LLM(str(tiny_model), config=tiny_config, progress=False) as llm:
        expected = sample(llm)
    with LLM(str(out), config=tiny_config, progress=False) as llm:
        assert sample(llm) == expected
    assert main(arguments) == 1
    assert f"paged: error: {out} exists and is no empty folder" in capsys.readouterr().err
