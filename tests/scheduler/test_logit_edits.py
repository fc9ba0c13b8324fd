"""Which token ids are biased or forbidden, step by step."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from paged.scheduler.logit_edits import LogitEdits, forbid, make_logit_edits
from paged.scheduler.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_PACKED_EDITS,
    MAX_STOP_TOKEN_IDS,
    ParameterError,
    SamplingParams,
)

VOCAB_SIZE = 1000


def make(params: SamplingParams, stop_ids=(), bad_words=()) -> LogitEdits | None:
    return make_logit_edits(params, vocab_size=VOCAB_SIZE, stop_ids=stop_ids, bad_words=bad_words)


def test_a_plain_request_edits_nothing():
    assert make(SamplingParams(), stop_ids=[2]) is None


def test_biases_apply_at_every_step():
    edits = make(SamplingParams(logit_bias={5: 1.5, 6: -2.0}))
    assert edits.at([]) == edits.at([9, 9]) == [(5, 1.5), (6, -2.0)]


def test_stop_ids_are_held_back_until_min_tokens():
    edits = make(SamplingParams(min_tokens=2), stop_ids=[2, 3, 2])
    assert edits.at([]) == edits.at([7]) == [(2, -math.inf), (3, -math.inf)]
    assert edits.at([7, 7]) == []


def test_min_tokens_wins_over_a_bias_on_a_stop_id():
    edits = make(SamplingParams(min_tokens=1, logit_bias={2: 100.0}), stop_ids=[2])
    assert sum(value for token_id, value in edits.at([]) if token_id == 2) == -math.inf


def test_a_bad_word_is_forbidden_where_it_would_be_completed():
    edits = make(SamplingParams(), bad_words=[[8], [1, 2, 3]])
    assert edits.at([]) == [(8, -math.inf)]
    assert edits.at([1, 2]) == [(8, -math.inf), (3, -math.inf)]
    assert edits.at([2, 1]) == [(8, -math.inf)]


def test_outputs_in_flight_count_towards_min_tokens():
    edits = make(SamplingParams(min_tokens=2), stop_ids=[2])
    assert edits.at([7], num_in_flight=0) == edits.at([], num_in_flight=1) == [(2, -math.inf)]
    assert edits.at([7], num_in_flight=1) == edits.at([], num_in_flight=2) == []


@pytest.mark.parametrize(("words", "depends"), [([], False), ([[8]], False), ([[8], [1, 2]], True)])
def test_only_bad_words_of_several_tokens_depend_on_the_tokens_before(words, depends):
    edits = make(SamplingParams(min_tokens=1, logit_bias={4: 1.0}), stop_ids=[2], bad_words=words)
    assert edits.depends_on_tokens == depends


def test_bans_that_depend_on_tokens_in_flight_are_refused():
    edits = make(SamplingParams(), bad_words=[[1, 2]])
    with pytest.raises(ValueError, match="bad words depend on 1 tokens that the device has not"):
        edits.at([1], num_in_flight=1)


def test_an_allow_list_keeps_its_biases_and_drops_others():
    edits = make(SamplingParams(allowed_token_ids=[4, 5], logit_bias={5: 2.0, 6: 9.0}))
    assert edits.only_edits
    assert edits.at([]) == [(4, 0.0), (5, 2.0)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"logit_bias": {1000: 1.0}}, "logit_bias"), ({"allowed_token_ids": [1000]}, "allowed_tok")],
)
def test_ids_outside_the_vocabulary_are_refused(fields, name):
    with pytest.raises(ParameterError, match=f"{name}.*below the vocabulary size 1000"):
        make(SamplingParams(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)},
            "logit_bias must have at most 1024 token ids, got '1025 ids'",
        ),
        (
            {"allowed_token_ids": range(MAX_ALLOWED_TOKEN_IDS + 1)},
            "allowed_token_ids must hold at most 262144 token ids, got '262145 ids'",
        ),
        (
            {"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)},
            "stop_token_ids must hold at most 1024 token ids, got '1025 ids'",
        ),
        (
            {"bad_words": ["a"] * (MAX_BAD_WORDS + 1)},
            "bad_words must hold at most 1024 strings, of 65536 characters in all, got '1025 of",
        ),
        (
            {"bad_words": ["a" * (MAX_BAD_WORDS_LENGTH + 1)]},
            "bad_words must hold at most 1024 strings, .* got '1 of 65537 characters'",
        ),
    ],
)
def test_more_than_the_bounds_is_refused_by_name(fields, message):
    with pytest.raises(ParameterError, match=message):
        make_logit_edits(SamplingParams(**fields), vocab_size=2**20, stop_ids=(), bad_words=())


@pytest.mark.parametrize("ids", [[5, -1], [True], [1.5], ["7"]])
def test_what_is_no_token_id_is_refused_among_others(ids):
    with pytest.raises(ParameterError, match=r"allowed_token_ids must be (an integer|at least 0)"):
        SamplingParams(allowed_token_ids=[1, 2, *ids])


# The long way


def allowed_ids(edits: LogitEdits) -> set[int]:
    """What the bits of the long way allow, by numpy."""
    bits = np.unpackbits(edits.wide.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


@pytest.mark.parametrize("missing", [0, 1])
def test_edits_take_the_long_way_when_they_are_too_many_for_the_short_one(missing):
    biases = dict.fromkeys(range(MAX_PACKED_EDITS - 10), 1.0)
    params = SamplingParams(logit_bias=biases, min_tokens=1)
    edits = make(params, stop_ids=range(900, 905), bad_words=[[i] for i in range(6 - missing)])
    assert (edits.wide is None) == bool(missing)


def test_many_biases_are_arrays():
    bias = {i * 3: float(i) for i in range(300)}
    edits = make(SamplingParams(logit_bias=bias))
    ids, values = edits.wide.bias_ids.tolist(), edits.wide.bias_values.tolist()
    assert dict(zip(ids, values, strict=True)) == {i: min(v, 100.0) for i, v in bias.items()}
    assert edits.wide.allowed is None


def test_a_long_allow_list_is_bits_without_the_bad_words():
    allowed = [*range(0, 999, 7), 999]
    bias = {7: 3.0, 8: 5.0}
    edits = make(
        SamplingParams(allowed_token_ids=allowed, logit_bias=bias), bad_words=[[14], [21, 28]]
    )
    assert allowed_ids(edits) == set(allowed) - {14}
    assert edits.forbidden_at([21]) == [28]
    assert edits.forbidden_at([20]) == []


def test_many_bad_words_and_stop_ids_are_bits_and_what_a_step_adds():
    words = [*([i] for i in range(200)), *([300 + i, 400 + i] for i in range(100)), [1, 305, 999]]
    edits = make(SamplingParams(min_tokens=2), stop_ids=range(500, 600), bad_words=words)
    assert allowed_ids(edits) == set(range(200, VOCAB_SIZE))
    assert edits.forbidden_at([305]) == [405, *range(500, 600)]
    assert edits.forbidden_at([1, 305]) == [405, 999]


@given(st.data())
def test_the_long_way_forbids_what_the_short_one_would(data):
    ids = st.integers(0, 99)
    words = data.draw(st.lists(st.lists(ids, min_size=1, max_size=3), min_size=65, max_size=90))
    output = data.draw(st.lists(ids, max_size=6))
    stop_ids = data.draw(st.lists(ids, max_size=5))
    params = SamplingParams(min_tokens=data.draw(st.integers(0, 4)))
    edits = make(params, stop_ids=stop_ids, bad_words=words)
    expected = {
        word[-1]
        for word in words
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]
    }
    if len(output) < params.min_tokens:
        expected |= set(stop_ids)
    allowed = np.full(32, -1, np.int32)
    if edits.wide.allowed is not None:
        allowed[:] = edits.wide.allowed
    forbid(allowed, edits.forbidden_at(output))
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:100]
    assert set(np.flatnonzero(bits == 0).tolist()) == expected
    assert {token_id for token_id, _ in edits.at(output)} == expected
