"""Embeddings of a real engine: golden logits tell what hidden states there must be."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.params import PoolingParams, SamplingParams
from paged.server.settings import PoolerConfig, ServerSettings
from tests.e2e.live_server import live_server


@pytest.fixture(scope="module")
def mean_url(tiny_model: Path, tiny_config: EngineConfig) -> Iterator[str]:
    """The URL of a server of the tiny llama that gives the mean of all tokens."""
    settings = ServerSettings(pooler_config=PoolerConfig(pooling="mean"), log_stats=False)
    with live_server(str(tiny_model), tiny_config, settings) as url:
        yield url


def embed(url: str, prompts: list[list[int]], **fields) -> np.ndarray:
    """Return the vectors, `[num_prompts, hidden_size]`."""
    response = httpx.post(f"{url}/v1/embeddings", json={"input": prompts, **fields}, timeout=200)
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


def golden_hidden(data_dir: Path) -> list[tuple[list[int], np.ndarray]]:
    """Prompts and the hidden states of their tokens, `[num_tokens, hidden_size]`."""
    folder = data_dir / "golden" / "tiny" / "llama"
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    head = load_file(folder / "model.safetensors")["lm_head.weight"].astype(np.float64)
    # 256 equations of 64 unknowns
    return [
        (case["prompt_ids"], np.linalg.lstsq(head, np.transpose(case["logits"]), rcond=None)[0].T)
        for case in cases
    ]


def scaled(vectors: Iterable[np.ndarray]) -> np.ndarray:
    rows = np.array(list(vectors))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_vectors_are_the_hidden_states_behind_the_golden_logits(tiny_url, data_dir: Path):
    # Every prefix of a prompt has logits of its own: all of them are prompts of one request.
    golden = [
        (ids[: i + 1], hidden[i]) for ids, hidden in golden_hidden(data_dir) for i in range(12)
    ]
    vectors = embed(tiny_url, [ids for ids, _ in golden])
    np.testing.assert_allclose(vectors, scaled(row for _, row in golden), atol=2e-5)


def test_means_are_those_of_the_hidden_states_behind_the_golden_logits(mean_url, data_dir: Path):
    golden = [
        (ids[:length], hidden[:length].mean(axis=0))
        for ids, hidden in golden_hidden(data_dir)
        for length in (1, 2, 8, 9, len(ids))
    ]
    prompts, wanted = [ids for ids, _ in golden], scaled(row for _, row in golden)
    for _ in range(2):  # the second time all that can be is cached
        np.testing.assert_allclose(embed(mean_url, prompts), wanted, atol=2e-5)


def pooled(
    engine: Engine, prompt: list[int], texts: Iterable[list[int]] = ()
) -> tuple[np.ndarray, int]:
    """The mean of a prompt that comes after some texts, and how much of it was thrown away."""
    text = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for number, other in enumerate(texts):
        engine.add_request(f"text {number}", other, text)
        engine.step()
    engine.add_request("mean", prompt, PoolingParams(pooling="mean"))
    (request,) = [each for each in engine.scheduler.unfinished if each.parent_id == "mean"]
    vectors, num_thrown_away = [], 0
    while engine.has_unfinished:
        before, num_preemptions = request.num_computed_tokens, request.num_preemptions
        outputs, _ = engine.step()
        num_thrown_away += before * (request.num_preemptions - num_preemptions)
        vectors += [output.pooled for output in outputs if output.request_id == "mean"]
    return vectors[-1], num_thrown_away


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_mean_is_the_same_in_chunks_and_after_preemption(make_tiny, async_scheduling):
    prompt = [3 + i * 7 % 250 for i in range(200)]  # 25 blocks, four steps
    alone, _ = pooled(make_tiny(), prompt)
    # 32 blocks: 25 for the prompt, 4 for the texts, which need four more while it is computed.
    engine = make_tiny(num_blocks=33, async_scheduling=async_scheduling)
    texts = [[50 + number] * (3 + number) for number in range(4)]
    vector, num_thrown_away = pooled(engine, prompt, texts)
    np.testing.assert_allclose(vector, alone, atol=1e-5)
    assert num_thrown_away > 64, "of several steps, which had their part of the mean"


def test_neither_chunks_nor_the_cache_nor_batch_mates_change_a_vector(tiny_url):
    prompt = [3 + i * 7 % 250 for i in range(200)]  # of a budget of 64 tokens a step
    alone = embed(tiny_url, [prompt], cache="no_store", cache_salt="first")
    with_others = embed(tiny_url, [prompt[:70], prompt, prompt[1:]], cache_salt="second")[1:2]
    cached = embed(tiny_url, [prompt], cache_salt="second")
    np.testing.assert_allclose(with_others, alone, atol=1e-5)
    np.testing.assert_allclose(cached, alone, atol=1e-5)


def test_vectors_and_texts_share_steps(tiny_url):
    prompt = [3 + i * 11 % 250 for i in range(40)]
    alone = embed(tiny_url, [prompt])
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{tiny_url}/v1/completions", json=body, timeout=200) as stream:
        events = stream.iter_lines()
        next(events)  # it runs
        np.testing.assert_allclose(embed(tiny_url, [prompt]), alone, atol=1e-5)
        assert list(events)[-2] == "data: [DONE]"
