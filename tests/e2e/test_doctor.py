"""`paged doctor` against a server that is driven into what it is to find.

The server has 64 blocks of 8 tokens and runs at most 16 requests.
"""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paged.server.cli import main


@contextmanager
def under_load(
    url: str, prompts: Iterator[list[int]], *, num_clients: int, max_tokens: int, num_first: int = 1
) -> Iterator[None]:
    """Keep requests at the server, from when `num_first` have ended until the block does."""
    stop, served, lock = threading.Event(), threading.Semaphore(0), threading.Lock()

    def send() -> None:
        with httpx.Client(timeout=240) as client:
            while not stop.is_set():
                with lock:
                    prompt = next(prompts)
                body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
                client.post(f"{url}/v1/completions", json=body).raise_for_status()
                served.release()

    clients = [threading.Thread(target=send) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        for _ in range(num_first):
            served.acquire()
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def find(url: str, capsys: pytest.CaptureFixture[str], name: str) -> dict[str, dict]:
    """Return what is found, once `name` is: on a busy machine the clients may fall behind."""
    for _ in range(5):
        assert main(["doctor", url, "--seconds", "2", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["findings"]
        found = {finding["name"]: finding for finding in listed}
        if name in found:
            break
    return found


def different_prompts(length: int) -> Iterator[list[int]]:
    for number in itertools.count():
        yield [number % 200 + 3, number // 200 + 3, *range(3, length + 1)]


def test_requests_that_take_each_others_blocks(tiny_url, capsys):
    # Each grows to 15 blocks.
    with under_load(tiny_url, different_prompts(20), num_clients=12, max_tokens=100):
        found = find(tiny_url, capsys, "kv_memory")
    evidence, advice = (" ".join(found["kv_memory"][key]) for key in ("evidence", "advice"))
    assert "preemptions took blocks" in evidence
    assert "--gpu-memory-utilization" in advice
    assert "batch_size" not in found


def test_requests_that_wait_for_a_place(tiny_url, capsys):
    # Sixteen of 3 blocks are not nine tenths of 64.
    with under_load(tiny_url, different_prompts(16), num_clients=40, max_tokens=8):
        found = find(tiny_url, capsys, "batch_size")
    assert "--max-num-seqs (now 16)" in " ".join(found["batch_size"]["advice"])
    assert "kv_memory" not in found


@pytest.mark.parametrize("name", ["working_set", "different_prompts"])
def test_misses_of_the_prefix_cache(tiny_url, capsys, name):
    prompts = different_prompts(110)
    if name == "working_set":
        # Of 14 blocks each: the sixth comes when the first is gone.
        prompts = itertools.cycle([next(prompts) for _ in range(6)])
    httpx.post(f"{tiny_url}/reset_prefix_cache", timeout=60).raise_for_status()
    with under_load(tiny_url, prompts, num_clients=1, max_tokens=1, num_first=8):
        found = find(tiny_url, capsys, name)
    assert found.keys() & {"working_set", "different_prompts"} == {name}


def test_two_prompts_are_compared(tiny_url, capsys, tmp_path: Path):
    first, second = tmp_path / "a.txt", tmp_path / "b.json"
    first.write_text("It is Monday. " * 3)
    second.write_text(json.dumps({"prompt": "It is Monday. It is Sunday. "}))
    assert main(["doctor", tiny_url, "--compare", str(first), str(second)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the first 20 are the same" in output
    assert "16 tokens which the second takes from the cache" in output
    assert "'M' stands against 'S'" in output
