"""`LLM` as a user of the library meets it, on the tiny llama."""

import json

import numpy as np
import pytest

from paged import LLM, SamplingParams
from paged.models.checkpoint import DirectoryCheckpoint
from paged.scheduler.errors import CapacityError
from paged.scheduler.params import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model, tiny_config):
    with LLM(str(tiny_model), config=tiny_config, progress=False) as llm:
        yield llm


def test_greedy_tokens_equal_the_golden(llm, data_dir):
    cases = json.loads((data_dir / "golden/tiny/llama/expected.json").read_text())["cases"]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([case["prompt_ids"] for case in cases], params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["greedy_ids"]
        assert output.finished
        assert output.outputs[0].finish_reason == "length"


def test_log_probabilities_equal_those_of_the_golden_logits(llm, data_dir):
    cases = json.loads((data_dir / "golden/tiny/llama/expected.json").read_text())["cases"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=4, ignore_eos=True)
    for case in cases:
        (output,) = llm.generate([case["prompt_ids"]], params, use_tqdm=False)
        logits = np.array(case["logits"][-1], np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        (position,) = output.outputs[0].logprobs
        best = np.argsort(-expected)[:4].tolist()
        assert list(position) == best
        for rank, token_id in enumerate(best):
            assert position[token_id].rank == rank + 1
            assert position[token_id].logprob == pytest.approx(expected[token_id], abs=1e-4)
        assert output.outputs[0].cumulative_logprob == pytest.approx(expected[best[0]], abs=1e-4)


def test_prompts_may_be_text_ids_or_mappings_and_keep_their_order(llm):
    prompts = ["abc", [97, 98, 99], {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["abc", None, "abc", None]
    assert {output.prompt_token_ids for output in outputs} == {(97, 98, 99)}


def test_one_prompt_needs_no_list(llm):
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([97, 98], GREEDY, use_tqdm=False)) == 1


def test_parameters_may_differ_by_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="Got 1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_chat_renders_the_template(llm):
    message = {"role": "user", "content": "hi"}
    (one,) = llm.chat([message], GREEDY, use_tqdm=False)
    assert "hi" in one.prompt
    two = llm.chat([[message], [message]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in two] == [one.outputs[0].text] * 2


def test_samples_come_in_order(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate(["abc"], params, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.token_ids for sample in output.outputs}) > 1


def test_a_repeated_prompt_is_found_in_whole_blocks(llm):
    prompt = [100 + i % 90 for i in range(100)]
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    (second,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96  # 99 tokens may hit, in blocks of 8
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_bad_prompt_among_good_ones_generates_nothing(llm):
    with pytest.raises(ParameterError, match="prompt must be shorter than the model's context"):
        llm.generate(["abc", [97] * 300], GREEDY, use_tqdm=False)
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)) == 1


def test_a_prompt_mapping_needs_a_prompt(llm):
    with pytest.raises(ValueError, match='needs "prompt" or "prompt_token_ids"'):
        llm.generate({"text": "abc"}, GREEDY, use_tqdm=False)


def test_settings_and_config_are_alternatives(tiny_model, tiny_config):
    with pytest.raises(TypeError, match="Pass config or settings, not both"):
        LLM(str(tiny_model), config=tiny_config, dtype="float32")


def test_a_pool_too_small_for_one_request_is_refused_with_the_remedy(tiny_model):
    with pytest.raises(CapacityError, match=r"only 8 .* lower --max-model-len to 128 or less"):
        LLM(
            str(tiny_model),
            max_model_len=256,
            num_gpu_blocks_override=9,
            compilation_cache_dir=None,
            progress=False,
        )


def test_contradicting_settings_are_refused_before_the_weights_are_read(tiny_model, monkeypatch):
    def load_params(*_args, **_options):
        raise AssertionError("too late")

    monkeypatch.setattr(DirectoryCheckpoint, "load_params", load_params)
    with pytest.raises(ValueError, match="must be at least max_model_len=64 without chunked"):
        LLM(
            str(tiny_model),
            max_model_len=64,
            max_num_batched_tokens=32,
            max_num_seqs=8,
            enable_chunked_prefill=False,
            compilation_cache_dir=None,
            progress=False,
        )


def test_a_context_beyond_the_models_is_refused(tiny_model):
    with pytest.raises(ValueError, match="max_model_len=1024 exceeds the 512 positions"):
        LLM(str(tiny_model), max_model_len=1024, progress=False)
