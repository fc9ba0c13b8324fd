"""Real models beside the demo model, from GGUF files, against their goldens in float32.

Token ids, greedy tokens of all prompts at once with their log probabilities, log probabilities of
prompts, and rendered conversations.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.params import SamplingParams
from tests.e2e.golden import check_greedy, prompt_ids
from tests.real_models import GEMMA3, QWEN_CODER, fetch_real_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LOGPROB_TOLERANCE = 5e-4  # see the tolerances of the golden data


@pytest.fixture(scope="module", params=[GEMMA3.name, QWEN_CODER.name])
def golden(request: pytest.FixtureRequest, data_dir: Path) -> dict:
    return json.loads((data_dir / "golden" / f"{request.param}.json").read_text())


@pytest.fixture(scope="module")
def loaded(golden: dict) -> Iterator[LoadedEngine]:
    config = EngineConfig(
        dtype="float32",
        max_model_len=1536,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        block_size=16,
        num_gpu_blocks_override=1024,
        compilation_cache_dir=None,
    )
    engine = load_engine(str(fetch_real_model(golden["model"])), config, progress=False)
    yield engine
    engine.engine.close()


def run(loaded: LoadedEngine, prompts: dict[str, list[int]], params: SamplingParams) -> dict:
    """Generate for all prompts at once; return token ids and log probabilities by name."""
    for name, token_ids in prompts.items():
        loaded.engine.add_request(name, token_ids, params)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    logprobs: dict[str, list] = {name: [] for name in prompts}
    while loaded.engine.has_unfinished:
        for output in loaded.engine.step()[0]:
            tokens[output.request_id] += output.outputs[0].token_ids
            logprobs[output.request_id] += output.outputs[0].logprobs or ()
    return {"tokens": tokens, "logprobs": logprobs}


def test_token_ids(loaded: LoadedEngine, golden: dict) -> None:
    tokenizer = loaded.engine.tokenizer
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt_ids(prompt), prompt["name"]


def test_greedy_tokens_and_their_log_probabilities(loaded: LoadedEngine, golden: dict) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5)
    prompts = {prompt["name"]: prompt for prompt in golden["prompts"]}
    result = run(loaded, {name: prompt_ids(prompt) for name, prompt in prompts.items()}, params)
    compared = 0
    for name, prompt in prompts.items():
        same = check_greedy(name, result["tokens"][name], prompt["steps"])
        compared += same
        positions = result["logprobs"][name][:same]
        for step, position in zip(prompt["steps"], positions, strict=False):
            got = position[step["id"]]
            assert got.logprob == pytest.approx(step["logprob"], abs=LOGPROB_TOLERANCE)
            for token_id, logprob in step.get("top5", ()):
                if token_id in position:  # neighbours that nearly tie may trade fifth place
                    got = position[token_id].logprob
                    assert got == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)
    assert compared > 0.8 * 64 * len(prompts)


def test_prompt_log_probabilities(loaded: LoadedEngine, golden: dict) -> None:
    prompts = {p["name"]: p for p in golden["prompts"] if "prompt_logprobs" in p}
    # Longer than a step, a window of Gemma 3 and what a prompt's chunk scores at once.
    assert max(len(prompt_ids(prompt)) for prompt in prompts.values()) > 1200
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for name, prompt in prompts.items():
        loaded.engine.add_request(name, prompt_ids(prompt), params)
    scored = {}
    while loaded.engine.has_unfinished:
        for output in loaded.engine.step()[0]:
            if output.prompt_logprobs is not None:
                scored[output.request_id] = output.prompt_logprobs
    for name, prompt in prompts.items():
        ids = prompt_ids(prompt)
        assert scored[name][0] is None
        got = [
            position[token_id].logprob
            for position, token_id in zip(scored[name][1:], ids[1:], strict=True)
        ]
        np.testing.assert_allclose(got, prompt["prompt_logprobs"][1:], atol=LOGPROB_TOLERANCE)


def test_conversations(loaded: LoadedEngine, golden: dict) -> None:
    template = loaded.checkpoint.chat_template
    if template is None:
        assert "conversations" not in golden
        return
    prompts = {}
    for number, conversation in enumerate(golden["conversations"]):
        text = template.render(
            conversation["messages"],
            tools=conversation.get("tools"),
            add_generation_prompt=conversation["add_generation_prompt"],
        )
        assert text == conversation["rendered"]
        token_ids = loaded.engine.tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == conversation["ids"]
        prompts[str(number)] = token_ids
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    result = run(loaded, prompts, params)
    for number, conversation in enumerate(golden["conversations"]):
        if "greedy_ids" in conversation:
            ties = set(conversation.get("near_tie_steps", ()))
            steps = [
                {"id": token_id, "gap": None, "near_tie": step in ties}
                for step, token_id in enumerate(conversation["greedy_ids"])
            ]
            check_greedy(f"conversation {number}", result["tokens"][str(number)], steps)
