"""Sampling parameters: defaults, ranges and what is normalised."""

import numpy as np
import pytest

from paged.scheduler.params import ParameterError, SamplingParams

BAD = [
    ("n", 0, "must be at least 1"),
    ("n", 10**7, "at most 128"),
    ("n", True, "must be an integer"),
    ("temperature", -0.1, r"must be in \[0, 2\]"),
    ("temperature", 2.1, r"must be in \[0, 2\]"),
    ("temperature", float("nan"), "must be a finite number"),
    ("temperature", "warm", "must be a finite number"),
    ("top_p", 0, r"must be in \(0, 1\]"),
    ("top_p", 1.01, r"must be in \(0, 1\]"),
    ("top_k", -2, "must be at least -1"),
    ("top_k", 1.5, "must be an integer"),
    ("min_p", 1.5, r"must be in \[0, 1\]"),
    ("presence_penalty", 2.5, r"must be in \[-2, 2\]"),
    ("frequency_penalty", -2.5, r"must be in \[-2, 2\]"),
    ("repetition_penalty", 0, r"must be in \(0, inf\)"),
    ("max_tokens", 0, "must be at least 1"),
    ("min_tokens", -1, "must be at least 0"),
    ("min_tokens", 17, "must not exceed max_tokens=16"),
    ("logprobs", 21, "at most 20"),
    ("seed", 2**63, "at most"),
    ("stop", "", "must hold non-empty strings"),
    ("stop", ["a", ""], "must hold non-empty strings"),
    ("stop", ["x"] * 65, "must hold at most 64 strings"),
    ("stop_token_ids", [-1], "must be at least 0"),
    ("allowed_token_ids", [], "must not be empty"),
    ("logit_bias", {-1: 0.5}, "must be at least 0"),
    ("logit_bias", {1: float("inf")}, "must be a finite number"),
    ("bad_words", [""], "must hold non-empty strings"),
    ("bad_words", "word", "must hold non-empty strings"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD)
def test_bad_value_names_parameter_and_rule(name, value, rule):
    with pytest.raises(ParameterError, match=f"{name} .*{rule}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_long_values_are_shortened_in_the_message():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(stop=["a" * 1000, ""])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("tiny", [0, 1e-6])
def test_vanishing_temperature_is_greedy_and_drops_truncation(tiny):
    params = SamplingParams(temperature=tiny, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


def test_small_temperature_is_raised_where_it_would_only_amplify_rounding():
    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_several_greedy_samples_are_refused():
    with pytest.raises(ParameterError, match="n must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)


def test_spellings_are_normalised():
    params = SamplingParams(
        top_k=-1, stop="end", stop_token_ids=[3, 3, 5], logit_bias={1: 200, 2: -200.0}
    )
    assert params.top_k == 0
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 5)
    assert params.logit_bias == {1: 100.0, 2: -100.0}


def test_parameters_can_be_replaced_and_compared():
    import dataclasses

    params = SamplingParams(n=3, seed=4, stop=["x"])
    one = dataclasses.replace(params, n=1)
    assert one == SamplingParams(seed=4, stop=["x"])


def test_values_beyond_the_device_s_numbers_mean_the_same_as_its_largest():
    assert SamplingParams(top_k=10**30).top_k == 2**31 - 1
    assert 0 < np.float32(SamplingParams(top_p=1e-320).top_p) < 1e-6
    for given in (1e308, 1e-320):
        penalty = np.float32(SamplingParams(repetition_penalty=given).repetition_penalty)
        assert np.isfinite(penalty)
        assert penalty > 0
