"""Embeddings of a real engine: golden logits tell what hidden states there must be."""

import json
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file


def embed(url: str, prompts: list[list[int]], **fields) -> np.ndarray:
    """Return the vectors, `[num_prompts, hidden_size]`."""
    response = httpx.post(f"{url}/v1/embeddings", json={"input": prompts, **fields}, timeout=200)
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


def test_vectors_are_the_hidden_states_behind_the_golden_logits(tiny_url, data_dir: Path):
    folder = data_dir / "golden" / "tiny" / "llama"
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    head = load_file(folder / "model.safetensors")["lm_head.weight"].astype(np.float64)
    # Every prefix of a prompt has logits of its own: all of them are prompts of one request.
    prompts = [case["prompt_ids"][: i + 1] for case in cases for i in range(12)]
    logits = np.array([case["logits"][i] for case in cases for i in range(12)])
    hidden = np.linalg.lstsq(head, logits.T, rcond=None)[0].T  # 256 equations of 64 unknowns
    wanted = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    np.testing.assert_allclose(embed(tiny_url, prompts), wanted, atol=2e-5)


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
