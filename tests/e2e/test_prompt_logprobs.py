"""Log probabilities of prompts, against the golden logits of the tiny llama at every position."""

import json

import numpy as np
import pytest

from paged import LLM, SamplingParams
from paged.scheduler.params import ParameterError


@pytest.fixture(scope="module")
def llm(tiny_model, tiny_config):
    with LLM(str(tiny_model), config=tiny_config, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def cases(data_dir):
    return json.loads((data_dir / "golden/tiny/llama/expected.json").read_text())["cases"]


def log_softmax(logits) -> np.ndarray:
    logits = np.array(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def params(num_top: int = 3, **fields) -> SamplingParams:
    fields = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, **fields}
    return SamplingParams(prompt_logprobs=num_top, **fields)


def check(positions, prompt_ids, logits, num_top: int = 3) -> None:
    assert positions[0] is None
    assert len(positions) == len(prompt_ids)
    for index in range(1, len(prompt_ids)):
        expected = log_softmax(logits[index - 1])
        token_id, found = prompt_ids[index], positions[index]
        best = np.argsort(-expected)[:num_top].tolist()
        assert list(found) == list(dict.fromkeys([token_id, *best]))
        rank = 1 + int((expected > expected[token_id]).sum())
        assert found[token_id].rank == rank
        for other, logprob in found.items():
            assert logprob.logprob == pytest.approx(expected[other], abs=1e-4)


def test_all_positions_equal_the_golden_in_one_batch_and_in_chunks(llm, cases):
    prompts = [case["prompt_ids"] for case in cases]
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    assert max(map(len, prompts)) > 8
    for case, output in zip(cases, outputs, strict=True):
        check(output.prompt_logprobs, case["prompt_ids"], case["logits"])
        assert list(output.outputs[0].token_ids) == case["greedy_ids"][:2]


def test_a_cached_prompt_is_computed_again_and_stays_cached(llm, cases):
    case = max(cases, key=lambda case: len(case["prompt_ids"]))
    plain = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([case["prompt_ids"]], plain, use_tqdm=False)
    (scored,) = llm.generate([case["prompt_ids"]], params(), use_tqdm=False)
    assert scored.num_cached_tokens == 0
    check(scored.prompt_logprobs, case["prompt_ids"], case["logits"])
    (after,) = llm.generate([case["prompt_ids"]], plain, use_tqdm=False)
    assert after.num_cached_tokens > 0
    assert after.prompt_logprobs is None


def test_samples_share_one_scored_prompt(llm, cases):
    case = cases[0]
    wanted = params(n=3, temperature=1.0, seed=1)
    (output,) = llm.generate([case["prompt_ids"]], wanted, use_tqdm=False)
    assert len(output.outputs) == 3
    check(output.prompt_logprobs, case["prompt_ids"], case["logits"])


def test_zero_reports_the_prompts_own_tokens_and_their_texts_join(llm):
    text = "naïve 😀"  # characters of several byte tokens
    (output,) = llm.generate([text], params(0), use_tqdm=False)
    ids = output.prompt_token_ids
    assert [list(p) for p in output.prompt_logprobs[1:]] == [[i] for i in ids[1:]]
    texts = [next(iter(p.values())).decoded_token for p in output.prompt_logprobs[1:]]
    assert "".join(texts) in (text, text[1:])  # the first token has no entry


def test_a_prompt_of_one_token_has_nothing_to_report(llm):
    (output,) = llm.generate([[97]], params(), use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("value", [-1, 21, 1.5, True])
def test_bad_values_are_refused(value):
    with pytest.raises(ParameterError, match="prompt_logprobs must be"):
        params(value)


def test_named_tokens_have_their_log_probabilities_at_every_step(llm, cases):
    case, named = cases[0], list(range(200, 100, -1))  # more than one program call takes
    wanted = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, logprobs=5, logprob_token_ids=named
    )
    (output,) = llm.generate([case["prompt_ids"]], wanted, use_tqdm=False)
    first, second = output.outputs[0].logprobs
    sampled = case["greedy_ids"][0]
    assert list(first) == list(dict.fromkeys([sampled, *named]))
    expected = log_softmax(case["logits"][-1])
    for token_id, logprob in first.items():
        assert logprob.logprob == pytest.approx(expected[token_id], abs=1e-4)
        assert logprob.rank == 1 + int((expected > expected[token_id]).sum())
    longer = [*case["prompt_ids"], sampled]
    (again,) = llm.generate([longer], wanted, use_tqdm=False)
    for token_id, logprob in again.outputs[0].logprobs[0].items():
        assert second[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("ids", [[-1], [256], list(range(129)), [1.5]])
def test_named_tokens_must_exist_and_be_few(llm, ids):
    with pytest.raises(ParameterError, match="logprob_token_ids must"):
        llm.generate([[97]], SamplingParams(logprobs=0, logprob_token_ids=ids), use_tqdm=False)
