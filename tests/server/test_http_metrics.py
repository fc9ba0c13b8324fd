"""HTTP metrics: names and labels as FastAPI's instrumentator has them, and few of them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import FakeEngine
from tests.server.serving import COMPLETIONS, Client, with_server

type Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_after(
    *requests: tuple[str, str, object], engine: FakeEngine | None = None, **settings
) -> Samples:
    """Send requests (method, path, body) and return what the page says of HTTP."""

    async def test(client: Client) -> str:
        for method, path, body in requests:
            async with client.request(method, path, json=body) as response:
                await response.read()
        async with client.get("/metrics") as response:
            return await response.text()

    page = with_server(test, engine, **settings)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        if family.name.startswith("http_")
        for sample in family.samples
    }


def requests_of(samples: Samples) -> dict[tuple[str, str, str], float]:
    """Return the counts by (handler, method, status)."""
    return {
        (labels[0][1], labels[1][1], labels[2][1]): value
        for (name, labels), value in samples.items()
        if name == "http_requests_total"
    }


def test_requests_are_counted_by_route_and_status():
    body = {"prompt": "a", "max_tokens": 2}
    samples = samples_after(
        ("POST", COMPLETIONS, body),
        ("POST", COMPLETIONS, {**body, "stream": True}),
        ("POST", COMPLETIONS, {**body, "temperature": -1}),
        ("GET", "/v1/models/tiny", None),
        ("GET", "/v1/models/other", None),
        ("GET", "/secret/1", None),
        ("GET", "/secret/2", None),
        ("PROPFIND", "/v1/models", None),
    )
    assert requests_of(samples) == {
        (COMPLETIONS, "POST", "2xx"): 2,
        (COMPLETIONS, "POST", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 2,
        ("none", "OTHER", "4xx"): 1,
    }


def test_probes_are_not_counted():
    paths = ("/health", "/ping", "/load", "/version", "/metrics")
    assert requests_of(samples_after(*[("GET", path, None) for path in paths])) == {}


def test_a_path_with_two_slashes_counts_as_the_route_that_answers_it():
    assert requests_of(samples_after(("GET", "/v1//models", None))) == {
        ("/v1/models", "GET", "2xx"): 1
    }


def test_requests_without_a_key_are_counted():
    samples = samples_after(("GET", "/v1/models", None), api_keys=("k",))
    assert requests_of(samples) == {("/v1/models", "GET", "4xx"): 1}


def test_sizes_are_those_of_the_headers():
    samples = samples_after(
        ("POST", "/tokenize", {"prompt": "abc"}), ("POST", "/tokenize", {"prompt": "abcdef"})
    )
    by_handler = (("handler", "/tokenize"),)
    size = len('{"prompt": "abc"}') + len('{"prompt": "abcdef"}')
    assert samples["http_request_size_bytes_sum", by_handler] == size
    assert samples["http_request_size_bytes_count", by_handler] == 2
    assert samples["http_response_size_bytes_sum", by_handler] > 2 * len('{"count":3}')


def test_time_goes_to_the_last_byte_of_a_stream():
    body = {"prompt": "a", "max_tokens": 4, "stream": True}
    samples = samples_after(("POST", COMPLETIONS, body), engine=FakeEngine(step_seconds=0.05))
    by_handler = (("handler", COMPLETIONS), ("method", "POST"))
    assert samples["http_request_duration_seconds_sum", by_handler] >= 4 * 0.05
    assert samples["http_request_duration_highr_seconds_count", ()] == 1
    assert samples["http_request_duration_highr_seconds_sum", ()] >= 4 * 0.05


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("http_request_duration_seconds", "0.1 0.5 1"),
        (
            "http_request_duration_highr_seconds",
            "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60",
        ),
    ],
)
def test_buckets_are_the_instrumentator_s(name, bounds):
    samples = samples_after(("GET", "/v1/models", None))
    got = {dict(labels)["le"] for (n, labels) in samples if n == f"{name}_bucket"}
    assert sorted(map(float, got)) == [*map(float, bounds.split()), float("inf")]
