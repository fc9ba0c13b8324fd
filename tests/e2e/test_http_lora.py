"""Adapters over HTTP on a real engine: golden tokens side by side, loading and replacing."""

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paged.scheduler.config import EngineConfig
from paged.server.cli import main
from paged.server.settings import LoRAModule, ServerSettings
from tests.e2e.live_server import live_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GOLDENS = {"tiny": "llama", "lora": "llama_lora", "lora_rs": "llama_lora_rs"}


@pytest.fixture(scope="module")
def adapters(data_dir: Path) -> Path:
    return data_dir / "golden" / "tiny"


@pytest.fixture(scope="module")
def url(tiny_model: Path, tiny_config: EngineConfig, adapters: Path) -> Iterator[str]:
    """The URL of a server of the tiny llama with one adapter; clients may load others."""
    # The shapes of test_lora.py: whoever comes second finds them compiled.
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    config = dataclasses.replace(tiny_config, **few, enable_lora=True, max_loras=2, max_lora_rank=8)
    settings = ServerSettings(
        served_model_names=("tiny",),
        lora_modules=(LoRAModule(name="lora", path=str(adapters / "llama_lora")),),
        allow_runtime_lora_updating=True,
        log_stats=False,
    )
    with live_server(str(tiny_model), config, settings) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=200) as connected:
        yield connected


@contextlib.contextmanager
def loaded(client: httpx.Client, name: str, path: Path) -> Iterator[None]:
    """Have an adapter served for as long as a test needs it."""
    answer = client.post(LOAD, json={"lora_name": name, "lora_path": str(path)})
    assert answer.text == f"Success: LoRA adapter '{name}' added successfully."
    try:
        yield
    finally:
        answer = client.post(UNLOAD, json={"lora_name": name})
        assert answer.text == f"Success: LoRA adapter '{name}' removed successfully."


def cases(adapters: Path, name: str) -> list[dict[str, Any]]:
    golden: list[dict[str, Any]] = json.loads(
        (adapters / GOLDENS[name] / "expected.json").read_text()
    )["cases"]
    return golden


def question(model: str, prompt_ids: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def check(body: dict[str, Any], model: str, case: dict[str, Any]) -> None:
    """Compare an answer with its golden, as far as no near tie makes that a matter of rounding."""
    assert body["model"] == model
    sure = case["first_near_tie_step"]
    assert body["choices"][0]["token_ids"][:sure] == case["greedy_ids"][:sure], model


def check_alone(client: httpx.Client, adapters: Path, model: str, golden: str) -> None:
    """Compare what a served name answers with the goldens of an adapter."""
    for case in cases(adapters, golden):
        answer = client.post("/v1/completions", json=question(model, case["prompt_ids"]))
        check(answer.json(), model, case)


def check_at_once(url: str, adapters: Path, goldens: list[tuple[str, str]]) -> None:
    """Do the same for several names at once, each of them twice; all share steps."""

    async def ask(client: httpx.AsyncClient, model: str, case: dict[str, Any]) -> None:
        answer = await client.post("/v1/completions", json=question(model, case["prompt_ids"]))
        check(answer.json(), model, case)

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=200) as client, asyncio.TaskGroup() as g:
            for model, golden in 2 * goldens:
                for case in cases(adapters, golden):
                    g.create_task(ask(client, model, case))

    asyncio.run(ask_all())


def test_base_and_adapters_at_once_give_their_golden_tokens(client, url, adapters):
    with loaded(client, "lora_rs", adapters / "llama_lora_rs"):
        check_at_once(url, adapters, [(name, name) for name in GOLDENS])


def test_more_adapters_than_places_take_turns(client, url, adapters):
    rs, other = adapters / "llama_lora_rs", adapters / "llama_lora"
    with loaded(client, "a", rs), loaded(client, "b", other):
        goldens = [("a", "lora_rs"), ("lora", "lora"), ("b", "lora"), ("tiny", "tiny")]
        check_at_once(url, adapters, goldens)


def test_the_official_client_finds_and_uses_an_adapter(url):
    official = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    listed = [(model.id, getattr(model, "parent", None)) for model in official.models.list().data]
    assert listed == [("tiny", None), ("lora", "tiny")]
    texts = {}
    for name, _ in listed:
        ask = [{"role": "user", "content": "Hi"}]
        chat = official.chat.completions.create(
            model=name, messages=ask, max_tokens=8, temperature=0
        )
        response = official.responses.create(
            model=name, input="Hi", max_output_tokens=8, temperature=0
        )
        assert (chat.model, response.model) == (name, name)
        assert response.output_text == chat.choices[0].message.content
        texts[name] = response.output_text
    assert texts["tiny"] != texts["lora"]
    with pytest.raises(openai.NotFoundError, match="Valid aliases: tiny, lora"):
        official.chat.completions.create(model="lor", messages=ask)


def test_embeddings_are_the_adapter_s(client):
    vectors = []
    for name in ("tiny", "lora"):
        answer = client.post("/v1/embeddings", json={"model": name, "input": "Hi"}).json()
        assert answer["model"] == name
        vectors.append(answer["data"][0]["embedding"])
    assert sum(a * b for a, b in zip(*vectors, strict=True)) < 0.99


def test_new_content_under_an_old_name_does_not_find_old_blocks(client, adapters, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters / "llama_lora", folder)
    with loaded(client, "changing", folder):
        check_alone(client, adapters, "changing", "lora")
        shutil.rmtree(folder)
        shutil.copytree(adapters / "llama_lora_rs", folder)
        again = {"lora_name": "changing", "lora_path": str(folder)}
        refused = client.post(LOAD, json=again)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "InvalidUserInput"
        check_alone(client, adapters, "changing", "lora")
        assert client.post(LOAD, json={**again, "load_inplace": True}).status_code == 200
        check_alone(client, adapters, "changing", "lora_rs")
    assert client.post("/v1/completions", json=question("changing", [1])).status_code == 404


def test_what_is_no_adapter_of_this_model_is_refused_and_changes_nothing(
    client, adapters, tmp_path
):
    def load(path: Path) -> tuple[int, str]:
        answer = client.post(LOAD, json={"lora_name": "new", "lora_path": str(path)})
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        return answer.status_code, error["type"]

    assert load(tmp_path / "nowhere") == (404, "NotFoundError")
    large = tmp_path / "large"
    shutil.copytree(adapters / "llama_lora", large)
    config = json.loads((large / "adapter_config.json").read_text())
    (large / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert load(large) == (500, "InternalServerError")
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "lora"]


def test_a_batch_file_may_name_adapters(url, adapters, tmp_path):
    lines = []
    for name in ("tiny", "lora"):
        for number, case in enumerate(cases(adapters, name)):
            body = question(name, case["prompt_ids"])
            lines.append({"custom_id": f"{name} {number}", "url": "/v1/completions", "body": body})
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main(["run-batch", "--url", url, "-i", str(source), "-o", str(output)]) == 0
    results = {r["custom_id"]: r for r in map(json.loads, output.read_text().splitlines())}
    for name in ("tiny", "lora"):
        for number, case in enumerate(cases(adapters, name)):
            check(results[f"{name} {number}"]["response"]["body"], name, case)


def test_the_metric_names_the_adapters_of_running_requests(client):
    pattern = r'lora_requests_info\{max_lora="2",running_lora_adapters="(.*)",waiting_.*"\}'
    body = {**question("lora", [1, 2, 3]), "max_tokens": 240, "stream": True}

    def running() -> str:
        found = re.search(pattern, client.get("/metrics").text)
        assert found is not None
        return found[1]

    def running_amid_a_stream() -> str:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            names = running()
            assert "data: [DONE]" in list(lines)
            return names

    # Several, as a busy machine may end a stream before it answers for the metrics.
    assert "lora" in {running_amid_a_stream() for _ in range(5)}
    assert running() == ""
