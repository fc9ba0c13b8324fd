"""Which token ids are biased or forbidden, step by step."""

import math

import pytest

from paged.scheduler.logit_edits import LogitEdits, make_logit_edits
from paged.scheduler.params import MAX_LOGIT_EDITS, ParameterError, SamplingParams


def make(params: SamplingParams, stop_ids=(), bad_words=()) -> LogitEdits | None:
    return make_logit_edits(params, vocab_size=1000, stop_ids=stop_ids, bad_words=bad_words)


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
    ("fields", "kwargs", "name"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_EDITS + 1), 1.0)}, {}, "logit_bias"),
        ({"allowed_token_ids": range(MAX_LOGIT_EDITS + 1)}, {}, "allowed_token_ids"),
        ({}, {"bad_words": [[i] for i in range(MAX_LOGIT_EDITS + 1)]}, "bad_words"),
        ({"min_tokens": 1}, {"stop_ids": range(MAX_LOGIT_EDITS + 1)}, "stop_token_ids"),
    ],
)
def test_more_edits_than_the_step_has_room_for_are_refused_by_name(fields, kwargs, name):
    with pytest.raises(ParameterError, match=f"{name} must not change more than 64 token ids"):
        make(SamplingParams(**fields), **kwargs)
