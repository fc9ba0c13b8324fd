"""The demo model's greedy texts equal the goldens however its requests are batched.

One at a time, all in one batch, in prompt chunks of at most 64 tokens, with so few blocks that
requests are preempted, and with prefix caching: the same tokens each time.
"""

from collections.abc import Sequence

import pytest

from paged.scheduler.engine import Engine
from paged.scheduler.params import SamplingParams
from tests.e2e.golden import check_greedy, prompt_ids

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
# Goldens and engine add in different orders; see the tolerances of the golden data.
LOGPROB_TOLERANCE = 5e-4


def run(engine: Engine, prompts: Sequence[dict], params: SamplingParams = GREEDY) -> dict:
    """Generate for all prompts at once; return token ids, logprobs and preemptions by name."""
    for prompt in prompts:
        engine.add_request(prompt["name"], prompt_ids(prompt), params)
    tokens: dict[str, list[int]] = {prompt["name"]: [] for prompt in prompts}
    logprobs: dict[str, list] = {prompt["name"]: [] for prompt in prompts}
    num_preempted = num_cached = 0
    while engine.has_unfinished:
        outputs, stats = engine.step()
        num_preempted += stats.num_preempted
        num_cached += stats.num_cached_prompt_tokens
        for output in outputs:
            tokens[output.request_id] += output.outputs[0].token_ids
            logprobs[output.request_id] += output.outputs[0].logprobs or ()
    assert engine.scheduler.kv_cache_usage == 0
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "num_preempted": num_preempted,
        "num_cached": num_cached,
    }


def check_all(result: dict, prompts: Sequence[dict]) -> None:
    compared = sum(
        check_greedy(prompt["name"], result["tokens"][prompt["name"]], prompt["steps"])
        for prompt in prompts
    )
    # Near ties may cut a comparison short, but not most of them.
    assert compared > 0.8 * sum(len(prompt["steps"]) for prompt in prompts)


def test_the_kernels_are_native(native, smollm):
    assert smollm.config.attention_backend == smollm.config.linear_backend == "native"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("short", "emoji"), id="some"),
        pytest.param(None, id="all", marks=pytest.mark.slow),
    ],
)
def test_one_at_a_time(make_engine, smollm_golden, names):
    engine = make_engine()
    for prompt in smollm_golden["prompts"]:
        if names is None or prompt["name"] in names:
            result = run(engine, [prompt])
            check_greedy(prompt["name"], result["tokens"][prompt["name"]], prompt["steps"])


def test_all_at_once_with_log_probabilities(make_engine, smollm_golden):
    prompts = smollm_golden["prompts"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5)
    result = run(make_engine(), prompts, params)
    check_all(result, prompts)
    for prompt in prompts:
        name = prompt["name"]
        same = check_greedy(name, result["tokens"][name], prompt["steps"])
        for step, position in zip(prompt["steps"][:same], result["logprobs"][name], strict=False):
            sampled = position[step["id"]]
            assert sampled.logprob == pytest.approx(step["logprob"], abs=LOGPROB_TOLERANCE)
            assert sampled.rank == 1
            for token_id, logprob in step.get("top5", ()):
                if token_id in position:  # neighbours that nearly tie may trade fifth place
                    got = position[token_id].logprob
                    assert got == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)


def test_prompts_in_chunks_of_at_most_64_tokens(make_engine, smollm_golden):
    prompts = smollm_golden["prompts"]
    check_all(run(make_engine(token_budget=64), prompts), prompts)


def test_so_few_blocks_that_requests_are_preempted(make_engine, smollm_golden):
    # 97 usable blocks of 16: room for one request of 1,536 tokens, not for all prompts at once.
    prompts = smollm_golden["prompts"]
    result = run(make_engine(num_blocks=98, token_budget=256), prompts)
    check_all(result, prompts)
    assert result["num_preempted"] > 0


def test_prefix_caching(make_engine, smollm_golden):
    prompts = smollm_golden["prompts"]
    engine = make_engine(enable_prefix_caching=True)
    first = run(engine, prompts)
    check_all(first, prompts)
    second = run(engine, prompts)
    check_all(second, prompts)
    # Every full block of a prompt is found again, but for the last token's.
    expected = sum((len(prompt_ids(prompt)) - 1) // 16 * 16 for prompt in prompts)
    assert second["num_cached"] == expected


def test_conversations_render_to_the_golden_text_and_answer_alike(smollm, smollm_golden):
    template = smollm.checkpoint.chat_template
    tokenizer = smollm.engine.tokenizer
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for number, conversation in enumerate(smollm_golden["conversations"]):
        text = template.render(
            conversation["messages"],
            tools=conversation.get("tools"),
            add_generation_prompt=conversation["add_generation_prompt"],
        )
        assert text == conversation["rendered"]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == conversation["ids"]
        smollm.engine.add_request(str(number), token_ids, params)
    tokens: dict[str, list[int]] = {}
    while smollm.engine.has_unfinished:
        for output in smollm.engine.step()[0]:
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    for number, conversation in enumerate(smollm_golden["conversations"]):
        if "greedy_ids" not in conversation:
            continue
        ties = set(conversation.get("near_tie_steps", ()))
        steps = [
            {"id": token_id, "gap": None, "near_tie": step in ties}
            for step, token_id in enumerate(conversation["greedy_ids"])
        ]
        check_greedy(f"conversation {number}", tokens[str(number)], steps)
