"""POST /v1/embeddings: one vector of length 1 per input, in both encodings."""

import base64
import re

import numpy as np
import pytest

from paged.scheduler.errors import QueueFullError
from paged.scheduler.params import PoolingParams
from paged.server.settings import PoolerConfig
from tests.server.fake_engine import FakeEngine, pooled_row
from tests.server.serving import error_of, ok

EMBEDDINGS = "/v1/embeddings"


def vectors(body, engine=None) -> list[np.ndarray]:
    answer = ok(EMBEDDINGS, body, engine)
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(item["embedding"]) for item in answer["data"]]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_every_form_of_input_gives_a_vector_per_prompt(given, prompts):
    got = vectors({"input": given, "add_special_tokens": False})
    for vector, prompt in zip(got, prompts, strict=True):
        np.testing.assert_allclose(vector, pooled_row(prompt) / 5, rtol=1e-6)


def test_base64_holds_the_same_numbers_in_float32():
    (numbers,) = vectors({"input": "ab", "dimensions": 8})
    answer = ok(EMBEDDINGS, {"input": "ab", "encoding_format": "base64"})
    data = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), numbers.astype(np.float32))


def test_usage_counts_inputs_alone():
    engine = FakeEngine(num_cached_tokens=2)
    answer = ok(EMBEDDINGS, {"input": [[97, 98, 99], [97]], "model": "tiny"}, engine)
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert all(seen.params == PoolingParams() for seen in engine.seen)


def test_settings_reach_the_engine():
    engine = FakeEngine()
    body = {"input": "ab", "priority": 3, "cache_salt": "s", "truncate_prompt_tokens": 1}
    ok(EMBEDDINGS, body, engine)
    (seen,) = engine.seen
    assert (seen.priority, seen.cache_salt, seen.prompt_token_ids) == (3, "s", (98,))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "input must not be empty"),
        ({"input": []}, "input", "input must not be an empty list"),
        ({"input": ["a", 1]}, "input", "must not mix"),
        ({"input": [300]}, "input", r"token ids in \[0, 255\]"),
        ({"input": "a" * 600}, "input", "maximum context length"),
        ({"input": ["a"] * 1025}, "input", "at most 1024 prompts"),
        ({"dimensions": 4}, "dimensions", "must be 8 or left out, got 4"),
        ({"encoding_format": "int8"}, "body.encoding_format", "int8"),
        ({"cache": "keep"}, "cache", "must be one of"),
    ],
)
def test_what_is_refused(fields, param, message):
    error = error_of(EMBEDDINGS, {"input": "a", **fields})
    assert error["param"] == param
    assert re.search(message, error["message"])


def test_unknown_model_is_404_and_a_full_queue_429():
    assert error_of(EMBEDDINGS, {"input": "a", "model": "x"}, status=404)["param"] == "model"
    full = FakeEngine(refuse=QueueFullError("3 requests are waiting"))
    assert "waiting" in error_of(EMBEDDINGS, {"input": "a"}, full, 429)["message"]


@pytest.mark.parametrize(
    ("modes", "told", "pooling"),
    [
        (set(), None, "last"),
        ({"lasttoken"}, None, "last"),
        ({"mean"}, None, "mean"),
        ({"mean"}, "last", "last"),
        ({"cls"}, "mean", "mean"),
    ],
)
def test_pooling_is_the_models_own_unless_the_server_is_told(modes, told, pooling):
    engine = FakeEngine()
    engine.checkpoint.pooling_modes = frozenset(modes)
    ok(EMBEDDINGS, {"input": "a"}, engine, pooler_config=PoolerConfig(pooling=told))
    assert engine.seen[-1].params == PoolingParams(pooling=pooling)


@pytest.mark.parametrize("modes", [{"cls"}, {"mean", "max"}, {"weightedmean"}])
def test_a_model_of_another_pooling_is_refused(modes):
    engine = FakeEngine()
    engine.checkpoint.pooling_modes = frozenset(modes)
    error = error_of(EMBEDDINGS, {"input": "a"}, engine, 501)
    assert f"pools its tokens by {', '.join(sorted(modes))}" in error["message"]
    assert "--pooler-config" in error["message"]
    assert error["type"] == "NotImplementedError"


def test_an_input_that_the_engine_gave_up_is_an_error():
    error = error_of(EMBEDDINGS, {"input": ["a", "b"]}, FakeEngine(has_vectors=False), 503)
    assert "send the request again" in error["message"]


def test_vectors_keep_their_length_if_the_server_is_told():
    body = {"input": [[97]], "add_special_tokens": False}
    answer = ok(EMBEDDINGS, body, pooler_config=PoolerConfig(normalize=False))
    assert answer["data"][0]["embedding"] == pooled_row(b"a").tolist()
