"""Adapters in host memory: read when needed, kept by use, listed by name."""

import asyncio
import threading
from typing import NamedTuple

import pytest

from paged.scheduler.config import EngineConfig
from paged.scheduler.lora_config import LoRAConfig
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.lora_store import LoRAStore


class Weights(NamedTuple):
    digest: str
    layers: dict = {}  # noqa: RUF012 - nobody looks


class Files:
    """A disk whose files may change; notes what is read."""

    def __init__(self, **contents: str) -> None:
        self.contents = contents
        self.read: list[str] = []

    def __call__(self, path: str) -> Weights:
        self.read.append(path)
        return Weights(self.contents[path])


def request(name: str, path: str | None = None) -> LoRARequest:
    return LoRARequest(name, lora_path=path or name)


def test_an_adapter_is_read_once_and_again_when_it_was_evicted():
    files = Files(a="1", b="2", c="3")
    store = LoRAStore(files, 2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert store.get(request(name)).key == (name, files.contents[name])
    assert files.read == ["a", "b", "c", "b"]


def test_adding_reads_anew_and_lists():
    files = Files(a="1")
    store = LoRAStore(files, 2)
    store.add(request("sql", "a"))
    files.contents["a"] = "2"
    assert store.get(request("sql", "a")).digest == "1"
    store.add(request("sql", "a"))
    assert store.get(request("sql", "a")).digest == "2"
    assert store.listed() == [request("sql", "a")]
    assert store.remove("sql")
    assert not store.remove("sql")
    assert store.listed() == []
    # It may still be named with its path.
    assert store.get(request("sql", "a")).digest == "2"
    assert len(files.read) == 3
    assert store.listed() == []


def test_what_cannot_be_read_changes_nothing():
    files = Files(a="1")
    store = LoRAStore(files, 2)
    store.add(request("sql", "a"))
    with pytest.raises(KeyError, match="nowhere"):
        store.add(request("sql", "nowhere"))
    assert store.listed() == [request("sql", "a")]
    assert store.get(request("sql", "a")).digest == "1"


def test_an_event_loop_does_not_wait_for_a_file_nor_do_those_whose_adapter_is_here():
    started, go_on = threading.Event(), threading.Event()

    def read(path: str) -> Weights:
        if path == "slow":
            started.set()
            assert go_on.wait(10)
        return Weights(path)

    async def run() -> None:
        store = LoRAStore(read, 4)
        await store.get_async(request("quick"))
        slow = [asyncio.create_task(store.get_async(request("slow"))) for _ in range(2)]
        await asyncio.to_thread(started.wait, 10)
        assert (await store.get_async(request("quick"))).digest == "quick"
        go_on.set()
        first, second = await asyncio.gather(*slow)
        assert first is second

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 0}, "max_loras=0 must be at least 1"),
        ({"max_lora_rank": 24}, "max_lora_rank=24 must be one of 1, 8, 16"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras=3 must be at least max_loras=4"),
        ({"lora_dtype": "int8"}, "lora_dtype='int8' is unknown; choose one of auto"),
        ({"lora_target_modules": ()}, "lora_target_modules must name a linear layer"),
        ({"enable_lora": True, "artifact": "x"}, "artifact has programs without room for LoRA"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_settings_count_only_if_adapters_are_on():
    assert EngineConfig(max_loras=3).lora_config is None
    config = EngineConfig(enable_lora=True, max_loras=3).lora_config
    assert config == LoRAConfig(max_loras=3)
    assert config is not None
    assert config.num_host_loras == 3
    assert LoRAConfig(max_loras=3, max_cpu_loras=8).num_host_loras == 8


def test_a_request_names_an_adapter_and_its_path():
    assert LoRARequest("sql", 7, "/adapters/sql") == LoRARequest(
        lora_name="sql", lora_int_id=7, lora_path="/adapters/sql"
    )
    with pytest.raises(ValueError, match="lora_name='' and lora_path='x' must both be given"):
        LoRARequest("", lora_path="x")
    with pytest.raises(ValueError, match="lora_int_id=0 must be at least 1; leave it out"):
        LoRARequest("sql", 0, "x")
