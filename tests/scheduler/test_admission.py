"""What is refused before any block is touched, and what is resolved on the way in."""

import pytest

from paged.models.tokenizer import Tokenizer
from paged.scheduler.admission import InputProcessor, parse_cache_mode
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.request import CacheMode
from tests.scheduler.fakes import TINY_TOKENIZER

EOS, OTHER_EOS = 2, 7


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return InputProcessor(
        Tokenizer.from_directory(TINY_TOKENIZER),
        vocab_size=256,
        max_model_len=32,
        eos_token_ids=[EOS, OTHER_EOS],
    )


def admit(processor, prompt=(10, 11), **fields):
    (request,) = processor.process("id", prompt, SamplingParams(**fields))
    return request


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt must hold at least one token"),
        (range(32), {}, "prompt must be shorter than the model's context of 32 tokens"),
        (range(33), {}, "raise --max-model-len, got '33 tokens'"),
        ([256], {}, r"prompt must hold token ids in \[0, 255\], got 256"),
        ([-1], {}, r"prompt must hold token ids in \[0, 255\], got -1"),
        ([1], {"max_tokens": 33}, "max_tokens must not exceed max_model_len=32"),
        ([1], {"max_tokens": None, "min_tokens": 32}, "min_tokens must not exceed the 31 tokens"),
        ([1], {"stop_token_ids": [256]}, "stop_token_ids must hold ids below .* 256"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(processor, prompt, fields, message):
    with pytest.raises(ParameterError, match=message):
        processor.process("id", prompt, SamplingParams(**fields))


@pytest.mark.parametrize(("asked", "got"), [(None, 30), (32, 30), (5, 5)])
def test_max_tokens_is_lowered_to_the_room_after_the_prompt(processor, asked, got):
    assert admit(processor, max_tokens=asked).max_tokens == got


def test_every_eos_stops_a_request_unless_ignored(processor):
    request = admit(processor, stop_token_ids=[9])
    assert request.eos_token_id == EOS
    assert request.stop_token_ids == {9, OTHER_EOS}
    ignoring = admit(processor, stop_token_ids=[9], ignore_eos=True)
    assert ignoring.eos_token_id is None
    assert ignoring.stop_token_ids == {9}


def test_min_tokens_holds_back_every_stop_even_those_ignored(processor):
    edits = admit(processor, min_tokens=1, stop_token_ids=[9], ignore_eos=True).logit_edits
    assert {token_id for token_id, _ in edits.at([])} == {EOS, OTHER_EOS, 9}


def test_samples_get_ids_and_consecutive_seeds(processor):
    requests = processor.process("id", [10], SamplingParams(n=3, seed=40))
    assert [r.request_id for r in requests] == ["0_id", "1_id", "2_id"]
    assert [r.seed for r in requests] == [40, 41, 42]
    assert {r.parent_id for r in requests} == {"id"}
    assert all(r.params.n == 1 for r in requests)


def test_requests_without_a_seed_differ_but_repeat_with_the_engines_seed():
    def seeds() -> list[int]:
        tokenizer = Tokenizer.from_directory(TINY_TOKENIZER)
        processor = InputProcessor(tokenizer, vocab_size=256, max_model_len=32, seed=5)
        return [admit(processor).seed for _ in range(3)]

    first = seeds()
    assert len(set(first)) == 3
    assert seeds() == first


def test_bad_words_are_forbidden_as_written_and_after_a_space(processor):
    edits = admit(processor, bad_words=["A"]).logit_edits
    assert edits.bad_words == ((ord("A"),),)  # " A" is two bytes here, so it adds nothing


@pytest.mark.parametrize("word", [" ", "  ", "\n", "\t ", "\u3000"])
def test_white_space_is_a_bad_word_as_it_is_written(processor, word):
    edits = admit(processor, bad_words=[word, " A"]).logit_edits
    assert edits.bad_words == (tuple(word.encode()), (ord("A"),))


@pytest.mark.parametrize("priority", [0, -1, 2**63 - 1, -(2**63)])
def test_every_sample_has_the_priority_and_the_cache_mode(processor, priority):
    params = SamplingParams(n=3, temperature=1.0)
    requests = processor.process(
        "id", (10, 11), params, cache_mode=CacheMode.PIN, priority=priority
    )
    assert [(r.priority, r.cache_mode) for r in requests] == [(priority, CacheMode.PIN)] * 3


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
def test_a_priority_beyond_64_bits_is_refused(processor, priority):
    with pytest.raises(ParameterError, match=r"priority must fit into 64 bits, got -?9223"):
        processor.process("id", (10, 11), SamplingParams(), priority=priority)


def test_cache_modes_have_names():
    names = ["default", "no_store", "pin", None]
    modes = [CacheMode.DEFAULT, CacheMode.NO_STORE, CacheMode.PIN, CacheMode.DEFAULT]
    assert [parse_cache_mode(name) for name in names] == modes


@pytest.mark.parametrize("name", ["", "Pin", 0, False, ["pin"]])
def test_an_unknown_cache_mode_is_refused_with_the_choices(name):
    with pytest.raises(ParameterError, match="cache must be one of default, no_store, pin, got"):
        parse_cache_mode(name)
