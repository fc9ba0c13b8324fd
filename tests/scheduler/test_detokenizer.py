"""Incremental text: deltas add up to the one-shot decode, stop strings match as by brute force."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.models.gguf_file import GGUFFile
from paged.models.gguf_tokenizer import gguf_tokenizer
from paged.models.tokenizer import Tokenizer
from paged.scheduler.detokenizer import IncrementalDetokenizer

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 49152

# Text whose characters take one to four bytes, alone and combined.
CHARACTERS = st.sampled_from("ab .\n\té日本語のガह्한👩🏽👨‍👩‍👧🇯🇵❤️🚀𝔘ﬁ")
TEXTS = st.text(CHARACTERS, max_size=30)


@pytest.fixture(scope="module")
def smollm(demo_model_path: Path) -> Tokenizer:
    return gguf_tokenizer(GGUFFile(demo_model_path))


class Bytes:
    """A vocabulary of the 256 bytes and one special token, 256, "<end>"."""

    special_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 256 else bytes([token_id])


class Words:
    """Token i is the i-th of these texts."""

    special_ids = frozenset[int]()

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def token_bytes(self, token_id: int) -> bytes:
        return self.texts[token_id].encode()


def chunks_of(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    """Cut ids into steps; a step may be empty."""
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    bounds = [0, *cuts, len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(bounds)]


def stream(detokenizer: IncrementalDetokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Deltas of a whole sample."""
    deltas = []
    for number, chunk in enumerate(chunks):
        stop = detokenizer.update(chunk)
        finished = stop is not None or number == len(chunks) - 1
        deltas.append(detokenizer.take_text(finished))
        if finished:
            break
    return deltas


# --- text --------------------------------------------------------------------------------------


@given(data=st.data(), text=TEXTS)
def test_deltas_of_a_text_are_the_text(smollm: Tokenizer, data: st.DataObject, text: str):
    ids = smollm.encode(text)
    chunks = data.draw(st.composite(chunks_of)(ids))
    detokenizer = IncrementalDetokenizer(smollm, smollm.encode("Say:"))
    deltas = stream(detokenizer, chunks)
    assert "".join(deltas) == text == detokenizer.text
    assert not any("\ufffd" in delta for delta in deltas)
    assert detokenizer.num_tokens == len(ids)


# Special tokens and single bytes come first in the vocabulary: more of those than by chance.
ANY_IDS = st.lists(st.integers(0, 300) | st.integers(0, VOCAB_SIZE - 1), max_size=40)


@given(data=st.data(), ids=ANY_IDS, skip=st.booleans())
def test_deltas_of_any_ids_are_the_one_shot_decode(
    smollm: Tokenizer, data: st.DataObject, ids: list[int], skip: bool
):
    chunks = data.draw(st.composite(chunks_of)(ids))
    detokenizer = IncrementalDetokenizer(smollm, [1], skip_special_tokens=skip)
    assert "".join(stream(detokenizer, chunks)) == smollm.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), raw=st.binary(max_size=20), num_prompt=st.integers(0, 20))
def test_a_prompt_may_end_within_a_character(data: st.DataObject, raw: bytes, num_prompt: int):
    """What the prompt began, the sample completes: both decode as one."""
    prompt, ids = raw[:num_prompt], raw[num_prompt:]
    detokenizer = IncrementalDetokenizer(Bytes(), prompt)
    text = "".join(stream(detokenizer, data.draw(st.composite(chunks_of)(ids))))
    whole = raw.decode("utf-8", "replace")
    # The prompt's own text is what is decided when the sample begins.
    assert whole.endswith(text)
    without = IncrementalDetokenizer(Bytes(), b"")
    without.update(prompt)
    assert without.take_text(finished=False) + text == whole


def test_the_last_byte_completes_what_the_prompt_began():
    rocket = "🚀".encode()
    for cut in range(1, 4):
        detokenizer = IncrementalDetokenizer(Bytes(), b"ab" + rocket[:cut])
        detokenizer.update(rocket[cut:] + b"c")
        assert detokenizer.take_text(finished=True) == "🚀c"


def test_golden_texts_stream_token_by_token(smollm: Tokenizer, data_dir: Path):
    golden = json.loads((data_dir / "golden/smollm2-135m-instruct.json").read_text())
    for row in golden["prompts"]:
        detokenizer = IncrementalDetokenizer(
            smollm, row["ids_no_special"], skip_special_tokens=False
        )
        deltas = stream(detokenizer, [[token_id] for token_id in row["greedy_ids"]])
        assert "".join(deltas) == row["greedy_text"], row["name"]


def test_half_a_character_waits_for_the_rest():
    detokenizer = IncrementalDetokenizer(Bytes(), b"")
    deltas = []
    for byte in "a🚀b".encode():
        detokenizer.update([byte])
        deltas.append(detokenizer.take_text(finished=False))
    assert deltas == ["a", "", "", "", "🚀", "b"]


def test_half_a_character_at_the_end_is_flushed_once():
    detokenizer = IncrementalDetokenizer(Bytes(), b"")
    detokenizer.update("a🚀".encode()[:3])
    assert detokenizer.take_text(finished=False) == "a"
    assert detokenizer.take_text(finished=True) == "\ufffd"
    assert detokenizer.take_text(finished=True) == ""
    assert detokenizer.text == "a\ufffd"


def test_special_tokens_are_left_out_or_spelled():
    for skip, expected in ((True, "ab"), (False, "a<end>b")):
        detokenizer = IncrementalDetokenizer(Bytes(), b"", skip_special_tokens=skip)
        detokenizer.update([97, 256, 98])
        assert detokenizer.take_text(finished=True) == expected
        assert detokenizer.num_tokens == 3


def test_only_the_end_of_a_long_prompt_is_read():
    class Counting(Bytes):
        num_read = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.num_read += 1
            return super().token_bytes(token_id)

    tokenizer = Counting()
    IncrementalDetokenizer(tokenizer, [97] * 100_000)
    assert tokenizer.num_read <= 3


# --- stop strings ------------------------------------------------------------------------------


def first_match(
    tokens: Sequence[str], stops: Sequence[str], min_tokens: int
) -> tuple[int, str, int] | None:
    """(end of the match, stop string, tokens needed), found by trying every end in turn."""
    text = "".join(tokens)
    shortest = len("".join(tokens[:min_tokens]))
    for end in range(shortest + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                count = next(n for n in range(len(tokens) + 1) if len("".join(tokens[:n])) >= end)
                return end, stop, count
    return None


TOKENS = st.lists(st.text("abé", max_size=3), max_size=12)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3, unique=True)


@given(data=st.data(), tokens=TOKENS, stops=STOPS, include=st.booleans(), low=st.integers(0, 5))
def test_stop_strings_match_as_by_brute_force(
    data: st.DataObject, tokens: list[str], stops: list[str], include: bool, low: int
):
    detokenizer = IncrementalDetokenizer(
        Words(*tokens), [], stop_strings=stops, include_stop_str=include, min_tokens=low
    )
    chunks = data.draw(st.composite(chunks_of)(range(len(tokens))))
    deltas = stream(detokenizer, chunks)
    match = first_match(tokens, stops, low)
    if match is None:
        assert detokenizer.stop_string is None
        assert "".join(deltas) == "".join(tokens) == detokenizer.text
        assert detokenizer.num_tokens == len(tokens)
        return
    end, stop, num_tokens = match
    assert detokenizer.stop_string == stop
    expected = "".join(tokens)[: end if include else end - len(stop)]
    assert "".join(deltas) == expected == detokenizer.text
    assert detokenizer.num_tokens == num_tokens


@given(tokens=TOKENS, stops=STOPS.filter(bool))
def test_what_is_held_back_is_one_less_than_the_longest_stop_string(
    tokens: list[str], stops: list[str]
):
    detokenizer = IncrementalDetokenizer(Words(*tokens), [], stop_strings=stops)
    released = ""
    for token_id in range(len(tokens)):
        if detokenizer.update([token_id]) is not None:
            break
        released += detokenizer.take_text(finished=False)
        kept = max(map(len, stops)) - 1
        assert released == detokenizer.text[: max(0, len(detokenizer.text) - kept)]


def test_the_reference_example_of_held_back_text():
    detokenizer = IncrementalDetokenizer(Words("Hello", " you"), [], stop_strings=["</end>"])
    detokenizer.update([0])
    assert detokenizer.take_text(finished=False) == ""
    detokenizer.update([1])
    assert detokenizer.take_text(finished=False) == "Hell"
    assert detokenizer.take_text(finished=True) == "o you"


def test_nothing_is_held_back_when_the_stop_string_is_included():
    detokenizer = IncrementalDetokenizer(
        Words("a</", "end>b"), [], stop_strings=["</end>"], include_stop_str=True
    )
    assert detokenizer.update([0]) is None
    assert detokenizer.take_text(finished=False) == "a</"
    assert detokenizer.update([1]) == "</end>"
    assert detokenizer.take_text(finished=False) == "end>"


def test_the_match_that_ends_first_wins_and_list_order_breaks_ties():
    def stop_of(*stops: str) -> str | None:
        return IncrementalDetokenizer(Words("xabcd"), [], stop_strings=stops).update([0])

    assert stop_of("abcd", "bc") == "bc"
    assert stop_of("bc", "abc") == "bc"
    assert stop_of("abc", "bc") == "abc"


def test_tokens_after_the_match_are_ignored():
    detokenizer = IncrementalDetokenizer(Words("a", "END", "b"), [], stop_strings=["END"])
    assert detokenizer.update([0, 1, 2]) == "END"
    assert detokenizer.update([2]) == "END"
    assert detokenizer.num_tokens == 2
    assert detokenizer.take_text(finished=True) == "a"


def test_a_stop_string_completed_too_early_does_not_count():
    detokenizer = IncrementalDetokenizer(
        Words("E", "ND", "END"), [], stop_strings=["END"], min_tokens=2
    )
    assert detokenizer.update([0, 1]) is None
    assert detokenizer.update([2]) == "END"
    assert detokenizer.take_text(finished=True) == "END"


def test_half_a_character_after_the_match_is_dropped():
    detokenizer = IncrementalDetokenizer(Bytes(), b"", stop_strings=["x"])
    assert detokenizer.update(b"ax\xf0") == "x"
    assert detokenizer.take_text(finished=True) == "a"


def test_importing_it_loads_no_jax():
    code = "import sys, paged.scheduler.detokenizer as d; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
