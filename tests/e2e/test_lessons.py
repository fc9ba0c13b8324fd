"""What users of other engines were hurt by, tried over HTTP; and where each of it is tested.

`LESSONS` numbers the complaints of public issue threads that show over HTTP. Each names the tests
that would fail if it were true here.
"""

import ast
import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged.server.settings import ServerSettings
from tests.e2e.live_server import live_server

HERE = "tests/e2e/test_lessons.py"
LESSONS: dict[int, tuple[str, list[str]]] = {
    1: (
        "a chat loses its cache to a batch of documents (mlx-serve#378)",
        [
            f"{HERE}::test_a_chat_outlives_a_batch_of_documents",
            "tests/e2e/test_http_cache.py::test_a_prompt_that_is_not_stored_is_not_found_but_finds",
        ],
    ),
    2: (
        "unhashed blocks push out cached ones (vllm#42656)",
        [f"{HERE}::test_prompts_of_less_than_a_block_push_nothing_out"],
    ),
    7: (
        "recomputed tokens count as cache hits (vllm#25780)",
        [f"{HERE}::test_preemption_ends_well_and_is_no_hit"],
    ),
    8: (
        "a request that is scheduled twice counts twice (vllm#43736)",
        [
            f"{HERE}::test_preemption_ends_well_and_is_no_hit",
            "tests/e2e/test_http_cache.py::test_counters_agree_with_what_clients_were_told",
        ],
    ),
    9: (
        "cached_tokens is null although there are hits (vllm#16162)",
        [
            "tests/e2e/test_http_cache.py::test_counters_agree_with_what_clients_were_told",
            "tests/server/test_completions.py::test_cached_tokens_are_reported_even_when_there_are_none",
        ],
    ),
    17: (
        "stuck under pressure; prompts that can never fit are tried forever (vllm#15996)",
        [
            f"{HERE}::test_preemption_ends_well_and_is_no_hit",
            f"{HERE}::test_what_can_never_fit_is_refused_at_once",
        ],
    ),
    20: (
        "the queue grows without a bound (vllm#2901)",
        [
            f"{HERE}::test_samples_beyond_the_queue_are_429",
            "tests/server/test_errors.py::test_full_queue_is_429_with_retry_after",
        ],
    ),
    21: (
        "health says 200 while the engine is dead (vllm#39863)",
        [
            "tests/server/test_operations.py::test_health_is_503_when_the_engine_is_dead",
            "tests/server/test_operations.py::test_draining_server_refuses_work_and_says_so_to_its_probes",
        ],
    ),
    22: (
        "generation goes on when the client has gone (vllm#9428)",
        [
            "tests/e2e/test_http_hostile.py::test_clients_killed_in_mid_stream_free_what_they_held",
            "tests/e2e/test_http_churn.py::test_clients_that_hang_up_leave_nothing_behind",
        ],
    ),
    23: (
        "structured output ends in white space or digits (vllm#38696, #52011)",
        [
            f"{HERE}::test_numbers_and_white_space_come_to_an_end",
            "tests/e2e/test_structured_outputs.py::test_random_schemas",
        ],
    ),
    24: (
        "bad schemas and templates are 500, or kill the engine (vllm#35438, #17313)",
        [
            f"{HERE}::test_bad_constraints_are_400_and_harm_nobody",
            "tests/server/test_chat.py::test_template_s_own_refusal_is_the_client_s_error",
            "tests/e2e/test_http_hostile.py::test_a_regex_that_explodes_holds_nobody_up",
        ],
    ),
    25: (
        "a stream says something else than the whole answer (vllm#51697, #53269)",
        [
            "tests/e2e/test_tool_calls.py::test_stream_of_a_seed_says_what_the_whole_answer_says",
            "tests/server/tool_parsers/test_formats.py::test_pieces_say_what_the_whole_says",
        ],
    ),
    26: (
        "characters are sent in parts, as U+FFFD (vmlx#129)",
        [
            "tests/server/test_streaming.py::test_split_characters_are_never_sent_in_parts",
            "tests/scheduler/test_detokenizer.py::test_half_a_character_waits_for_the_rest",
        ],
    ),
    27: (
        "temperature 0 depends on the batch (vllm#5898)",
        [f"{HERE}::test_greedy_answers_depend_neither_on_company_nor_on_the_cache"],
    ),
    30: (
        "names of adapters and salts share one space (vllm#44701)",
        [
            "tests/e2e/test_http_cache.py::test_tenants_find_their_own_prefixes_and_nobody_elses",
            "tests/server/test_handling.py::test_no_salt_of_a_body_reaches_another_tenant",
        ],
    ),
    33: (
        "the API key guards some paths only (vllm#18892)",
        [
            "tests/server/test_auth.py::test_every_route_but_the_probes_needs_a_key",
            "tests/server/test_auth.py::test_a_route_added_later_is_closed",
        ],
    ),
    35: (
        "fields without a bound stall the server (vllm#45390, #55473)",
        [
            "tests/e2e/test_http_hostile.py::test_bad_bodies_are_refused_by_name",
            "tests/server/tool_parsers/test_formats.py::test_hostile_texts_take_linear_time",
        ],
    ),
}


@pytest.mark.parametrize("number", LESSONS)
def test_each_lesson_has_tests(number: int):
    root = Path(__file__).parents[2]
    for test in LESSONS[number][1]:
        file, _, name = test.partition("::")
        functions = ast.parse((root / file).read_text()).body
        assert name in [f.name for f in functions if isinstance(f, ast.FunctionDef)], test


type Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def url(tiny_model, tiny_config) -> Iterator[str]:
    """A server whose cache resists scans, and whose queue is short."""
    config = dataclasses.replace(tiny_config, prefix_cache_policy="arc", max_num_queued_reqs=40)
    with live_server(str(tiny_model), config, ServerSettings(log_stats=False)) as url:
        yield url


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with httpx.Client(base_url=url, timeout=100) as client:

        def post(prompt: Any, *, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
            name = "messages" if "chat" in path else "prompt"
            defaults = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
            return client.post(path, json={name: prompt, **defaults, **fields})

        yield post


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 41 + i * (seed + 2)) % 250 for i in range(length)]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def counters(url: str) -> dict[str, float]:
    """The sum over labels of every sample of the metrics."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def test_a_chat_outlives_a_batch_of_documents(post: Post):
    chat = prompt(1, 100)
    assert [cached(post(chat)) for _ in range(3)] == [0, 96, 96]
    for seed in range(100, 132):  # 32 x 25 blocks, where there are 64
        post(prompt(seed, 200))
    assert cached(post(chat)) > 0


def test_prompts_of_less_than_a_block_push_nothing_out(post: Post):
    long = prompt(2, 200)
    post(long)
    for seed in range(200, 300):
        post(prompt(seed, 1 + seed % 5))
    assert cached(post(long)) == 192


def test_preemption_ends_well_and_is_no_hit(url: str, post: Post):
    before = counters(url)
    prompts = [prompt(seed, 30 + seed % 7) for seed in range(400, 410)]
    answers = together([lambda p=p: post(p, max_tokens=120) for p in prompts])
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [120] * 10
    after = counters(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:num_preemptions_total"] > 0
    assert grown["vllm:prefix_cache_hits_total"] == 0
    assert [cached(answer) for answer in answers] == [0] * 10
    num_prompt_tokens = sum(map(len, prompts))
    assert grown["vllm:prefix_cache_queries_total"] == num_prompt_tokens
    assert grown["vllm:prompt_tokens_total"] == num_prompt_tokens


def test_what_can_never_fit_is_refused_at_once(post: Post):
    answer = post(prompt(3, 256))
    assert answer.status_code == 400
    assert "maximum context length is 256 tokens" in answer.json()["error"]["message"]


def test_samples_beyond_the_queue_are_429(post: Post):
    answer = post([prompt(4, 9), prompt(5, 9)], n=60, temperature=1, max_tokens=20)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "1"
    assert post(prompt(4, 9)).status_code == 200


def test_numbers_and_white_space_come_to_an_end(post: Post):
    number = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 90}
    schemas = [number, {"type": "integer"}, {"type": "array", "items": number, "maxItems": 3}]
    for seed, schema in enumerate(schemas * 3):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        # Whatever the model wants to say, it is a digit.
        digits = {str(ord(c)): 100 for c in "0123456789"}
        fields = {"temperature": 1, "seed": seed, "max_tokens": 120, "response_format": format}
        messages = [{"role": "user", "content": "x"}]
        answer = post(messages, path="/v1/chat/completions", logit_bias=digits, **fields).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", choice["message"]["content"]
        json.loads(choice["message"]["content"])
        assert not set(choice["message"]["content"]) & set(" \t\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        {"structured_outputs": {"regex": "(unclosed"}},
        {"structured_outputs": {"grammar": "root ::= undefined"}},
        {"structured_outputs": {"json": "{"}},
    ],
    ids=["schema", "regex", "grammar", "json"],
)
def test_bad_constraints_are_400_and_harm_nobody(post: Post, fields: dict):
    answer = post("x", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(fields)))
    assert post("x").status_code == 200


def test_greedy_answers_depend_neither_on_company_nor_on_the_cache(post: Post):
    prompts = [prompt(seed, 20 + seed % 9) for seed in range(500, 508)]

    def ask(number: int) -> tuple[list[str], list[float]]:
        answer = post(prompts[number], max_tokens=24, logprobs=1).json()
        logprobs = answer["choices"][0]["logprobs"]
        return logprobs["tokens"], logprobs["token_logprobs"]

    cold = [ask(number) for number in range(8)]
    warm = [ask(number) for number in range(8)]
    batch = together([lambda number=number: ask(number) for number in range(8)])
    for other in (warm, batch):
        for (tokens, logprobs), (others, other_logprobs) in zip(cold, other, strict=True):
            assert others == tokens
            assert other_logprobs == pytest.approx(logprobs, abs=1e-4)
