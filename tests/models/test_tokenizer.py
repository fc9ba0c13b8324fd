"""Tokenizers: ids equal the goldens, bytes equal the decoded text, files are read as they are."""

import itertools
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend

from paged.models.errors import CheckpointError
from paged.models.gguf_file import GGUFFile
from paged.models.gguf_tokenizer import gguf_tokenizer
from paged.models.tokenizer import Tokenizer
from tests.models.gguf_writing import write_gguf


@pytest.fixture(scope="module")
def golden(data_dir: Path) -> dict[str, Any]:
    return json.loads((data_dir / "golden/smollm2-135m-instruct.json").read_text())


@pytest.fixture(scope="module")
def smollm(demo_model_path: Path) -> Tokenizer:
    return gguf_tokenizer(GGUFFile(demo_model_path))


@pytest.fixture(scope="module")
def tiny_dir(data_dir: Path) -> Path:
    return data_dir / "golden/tiny/tokenizer"


@pytest.fixture
def copied_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A tokenizer directory whose files a test may change."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "tokenizer"))


# --- the demo model ----------------------------------------------------------------------------


def test_prompts_have_the_golden_ids(smollm: Tokenizer, golden: dict[str, Any]):
    for prompt in golden["prompts"]:
        ids = smollm.encode(prompt["text"], add_special_tokens=False)
        assert ids == prompt["ids_no_special"], prompt["name"]
        assert smollm.encode(prompt["text"]) == (prompt["ids"] or ids), prompt["name"]
        decoded = smollm.decode(ids, skip_special_tokens=False)
        known = prompt["decoded_no_special"]
        assert decoded == (prompt["text"] if known is True else known), prompt["name"]


def test_conversations_have_the_golden_ids(smollm: Tokenizer, golden: dict[str, Any]):
    for conversation in golden["conversations"]:
        ids = smollm.encode(conversation["rendered"], add_special_tokens=False)
        assert ids == conversation["ids"]


def test_golden_texts_are_decoded(smollm: Tokenizer, golden: dict[str, Any]):
    for prompt in golden["prompts"]:
        ids = prompt["greedy_ids"]
        assert smollm.decode(ids, skip_special_tokens=False) == prompt["greedy_text"]


def test_special_tokens_of_the_demo_model(smollm: Tokenizer):
    assert (smollm.bos_token, smollm.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm.eos_token, smollm.eos_token_id) == ("<|im_end|>", 2)
    assert smollm.eos_token_ids == {2}
    assert smollm.special_ids == set(range(17))
    assert smollm.vocab_size == 49152
    assert smollm.chat_template is not None
    assert smollm.decode([1, 19556, 2]) == smollm.decode([19556])


def test_smollm_splits_at_every_numeric_character(smollm: Tokenizer):
    assert [smollm.token_text(i) for i in smollm.encode(" 12½²")] == [" ", "1", "2", "½", "²"]


# SmolLM2's vocabulary lacks the bytes of six control characters and of planes 4 to 11: the
# original drops them too.
ENCODABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
)


@given(text=st.text(ENCODABLE))
def test_bytes_of_tokens_are_the_bytes_of_the_text(smollm: Tokenizer, text: str):
    ids = smollm.encode(text)
    assert b"".join(map(smollm.token_bytes, ids)) == text.encode()


@given(ids=st.lists(st.integers(0, 300) | st.integers(0, 49151)))
def test_bytes_of_any_ids_are_those_that_decode_sees(smollm: Tokenizer, ids: list[int]):
    joined = b"".join(map(smollm.token_bytes, ids)).decode("utf-8", "replace")
    assert joined == smollm.decode(ids, skip_special_tokens=False)


def test_an_id_without_a_token_has_no_text(smollm: Tokenizer):
    assert smollm.token_bytes(49152) == b""
    assert smollm.token_text(10**6) == ""
    assert smollm.decode([10**6]) == ""


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_long_texts_have_the_ids_of_a_single_encoding(
    smollm: Tokenizer, tiny_dir: Path, add_special_tokens: bool
):
    text = "The 12 quick  foxes,\n日本語 🦙 <|im_end|><eos> é½ " * 1000
    with_bos = Tokenizer.from_directory(tiny_dir)
    with_bos.backend.post_processor = processors.TemplateProcessing(
        single=["<bos>", "$A"], special_tokens=[("<bos>", 1)]
    )
    for tokenizer in (smollm, with_bos):
        expected = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids
        assert tokenizer.encode(text, add_special_tokens) == expected


def test_encoding_a_long_text_lets_other_threads_run(smollm: Tokenizer):
    text = "hello world foo bar " * 50_000

    def longest_gap() -> float:
        """How long this thread was stuck, as a share of the time that encoding took."""
        ticks = []
        with ThreadPoolExecutor(1) as pool:
            started = time.perf_counter()
            encoding = pool.submit(smollm.encode, text)
            while not encoding.done():
                ticks.append(time.perf_counter())
                time.sleep(0.001)
            total = time.perf_counter() - started
        gaps = (later - earlier for earlier, later in itertools.pairwise([started, *ticks]))
        return max(gaps) / total

    # A busy machine may hold up this thread once; a lock does so every time.
    assert any(longest_gap() < 0.7 for _ in range(5))


def test_part_of_a_character_is_shown_as_such(smollm: Tokenizer):
    first, *_ = smollm.encode("🦙")
    assert smollm.token_text(first) == "\ufffd"


def test_lone_surrogates_are_refused(smollm: Tokenizer):
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D\) at position 2"):
        smollm.encode("ab\ud83d")
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D\) at position 30000"):
        smollm.encode("a" * 30_000 + "\ud83d")
    with pytest.raises(TypeError):
        smollm.encode(None)  # type: ignore[arg-type]


# --- directories -------------------------------------------------------------------------------


def test_directory_of_the_tiny_models(tiny_dir: Path):
    tokenizer = Tokenizer.from_directory(tiny_dir)
    for case in json.loads((tiny_dir / "expected.json").read_text())["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
        assert b"".join(map(tokenizer.token_bytes, case["ids"])) == case["text"].encode()
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<bos>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template is not None


def test_missing_tokenizer_json_names_the_remedy(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; save the tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_damaged_files_are_refused(copied_dir: Path):
    (copied_dir / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        Tokenizer.from_directory(copied_dir)
    (copied_dir / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: holds no JSON object"):
        Tokenizer.from_directory(copied_dir)
    (copied_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is no tokenizer"):
        Tokenizer.from_directory(copied_dir)


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    config = json.loads(path.read_text()) if path.exists() else {}
    config |= values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_special_tokens_may_be_objects_or_stand_in_the_old_file(copied_dir: Path):
    config = copied_dir / "tokenizer_config.json"
    change(config, bos_token={"content": "<bos>", "lstrip": False}, eos_token=None)
    change(copied_dir / "special_tokens_map.json", eos_token={"content": "<eos>"})
    tokenizer = Tokenizer.from_directory(copied_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_special_token_without_an_id_counts_as_absent(copied_dir: Path):
    change(copied_dir / "tokenizer_config.json", bos_token="<none>", eos_token=None)
    tokenizer = Tokenizer.from_directory(copied_dir)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (None, None)
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == (None, frozenset())


def test_end_of_sequence_ids_of_the_generation_config_are_added(copied_dir: Path):
    change(copied_dir / "config.json", eos_token_id=9)
    assert Tokenizer.from_directory(copied_dir).eos_token_ids == {2, 9}
    change(copied_dir / "generation_config.json", eos_token_id=[7, 8])
    tokenizer = Tokenizer.from_directory(copied_dir)
    assert tokenizer.eos_token_ids == {2, 7, 8}
    assert tokenizer.eos_token_id == 2


def test_chat_template_forms(copied_dir: Path):
    config = copied_dir / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(config, chat_template=named)
    assert Tokenizer.from_directory(copied_dir).chat_template == "D"
    change(config, chat_template=None)
    assert Tokenizer.from_directory(copied_dir).chat_template is None
    (copied_dir / "chat_template.json").write_text('{"chat_template": "P"}')
    # Of a processor, if the tokenizer has none.
    assert Tokenizer.from_directory(copied_dir).chat_template == "P"
    (copied_dir / "chat_template.jinja").write_text("J")
    change(config, chat_template="C")
    assert Tokenizer.from_directory(copied_dir).chat_template == "J"


def test_truncation_and_padding_of_the_file_are_turned_off(copied_dir: Path):
    backend = Backend.from_file(str(copied_dir / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=8)
    backend.save(str(copied_dir / "tokenizer.json"))
    assert Tokenizer.from_directory(copied_dir).encode("hello") == list(b"hello")


def test_other_decoders_are_refused():
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match=r"decoder \[None\] is not supported"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer(backend)


def test_metaspace_vocabularies_are_understood():
    backend = Backend(models.WordLevel({"▁日本": 0, "▁": 1}))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_text(i) for i in (0, 1)] == [" 日本", " "]


def test_added_tokens_outside_the_byte_alphabet_are_spelled_as_they_are(tiny_dir: Path):
    backend = Backend.from_file(str(tiny_dir / "tokenizer.json"))
    backend.add_tokens([AddedToken("日 本", special=True)])
    tokenizer = Tokenizer(backend)
    (token_id,) = tokenizer.encode("日 本")
    assert tokenizer.token_text(token_id) == "日 本"
    assert token_id in tokenizer.special_ids


# --- vocabularies in GGUF metadata -------------------------------------------------------------

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(tmp_path: Path, **changes: Any) -> GGUFFile:
    """A byte-level vocabulary of single bytes and a few merges; `changes` are tokenizer.ggml.*."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printing]
    alphabet = [chr(byte) for byte in printing] + [chr(256 + i) for i in range(len(hidden))]
    merged = ["12", "123", "Ġa", "la"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*alphabet, *merged, "<s>", "<tool>"],
        "merges": ["1 2", "12 3", "Ġ a", "l a"],
        "token_type": [1] * (len(alphabet) + len(merged)) + [3, 4],
        "bos_token_id": len(alphabet) + len(merged),
        **changes,
    }
    return write(tmp_path, values)


def write(tmp_path: Path, values: dict[str, Any]) -> GGUFFile:
    metadata = {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}
    return GGUFFile(write_gguf(tmp_path / "vocab.gguf", metadata, {}))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [" a", "123", "4", " ", "!", "\n"]),
        ("default", [" a", "123", "4", " ", "!", "\n"]),
        ("smollm", [" a", "1", "2", "3", "4", " ", "!", "\n"]),
        ("qwen2", [" a", "1", "2", "3", "4", " ", "!", "\n"]),
        ("llama-bpe", ["<s>", " a", "123", "4", " ", "!", "\n"]),
        ("gpt-4o", [" a", "123", "4", " ", "!", "\n"]),
    ],
)
def test_pre_tokenizers_cut_as_their_originals(tmp_path: Path, pre: str, expected: list[str]):
    assert pieces(gguf_tokenizer(byte_level(tmp_path, pre=pre)), " a1234 !\n") == expected


def test_words_of_gpt_4o_end_where_a_capital_follows(tmp_path: Path):
    backend = gguf_tokenizer(byte_level(tmp_path, pre="gpt-4o")).backend
    text = "HelloWorld's ABC don't 12345 a/b//\n x"
    words = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    expected = ("Hello", "World's", " ABC", " don't", " ", "123", "45", " a", "/b", "//\n", " x")
    assert words == [*expected]


def test_llama3_takes_a_word_that_is_a_token_as_it_is(tmp_path: Path):
    tokenizer = gguf_tokenizer(byte_level(tmp_path, pre="llama-bpe", merges=["1 2"]))
    assert pieces(tokenizer, "123") == ["<s>", "123"]
    tokenizer = gguf_tokenizer(byte_level(tmp_path, pre="gpt-2", merges=["1 2"]))
    assert pieces(tokenizer, "123") == ["12", "3"]


def test_begin_of_sequence_follows_the_metadata(tmp_path: Path):
    tokenizer = gguf_tokenizer(byte_level(tmp_path, add_bos_token=True))
    assert pieces(tokenizer, "1") == ["<s>", "1"]
    assert tokenizer.decode(tokenizer.encode("1")) == "1"
    assert len(tokenizer.encode("1", add_special_tokens=False)) == 1
    tokenizer = gguf_tokenizer(byte_level(tmp_path, pre="llama-bpe", add_bos_token=False))
    assert pieces(tokenizer, "1") == ["1"]


def test_user_defined_tokens_are_whole_but_not_special(tmp_path: Path):
    tokenizer = gguf_tokenizer(byte_level(tmp_path))
    assert pieces(tokenizer, "1<tool>1") == ["1", "<tool>", "1"]
    assert tokenizer.decode(tokenizer.encode("<s><tool>")) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer model 'bert' is not supported \(supported: gpt2, llama\)"),
        ({"model": None}, "tokenizer model 'None' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported .*smollm"),
        ({"pre": None}, "pre-tokenizer 'None' is not supported"),
        ({"tokens": ["a", "a"]}, "vocabulary is empty or holds a token twice"),
        ({"tokens": None}, "vocabulary is empty or holds a token twice"),
        ({"merges": ["1 zz"]}, "merge '1 zz' is not among its tokens"),
        ({"model": "llama"}, "tokens and 0 scores"),
    ],
)
def test_vocabularies_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(byte_level(tmp_path, **changes))


# Each piece but the first characters can be cut in one way only, so that ties cannot arise.
PIECES = {"▁": -9.0, "a": -9.5, "b": -9.6, "c": -9.7, "▁a": -1.0, "ab": -2.0, "▁ab": -3.0}
PIECES |= {"bc": -2.5, "cc": -0.5, "cca": -4.0}


def sentencepiece(tmp_path: Path, **changes: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *PIECES]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (len(tokens) - len(PIECES)) + list(PIECES.values()),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return gguf_tokenizer(write(tmp_path, values))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("spm"))


def merge_by_score(text: str) -> list[str]:
    """SentencePiece's algorithm, by the book: join the best-scored neighbours, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(PIECES.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best = max(((score, i) for score, i in joined if score is not None), default=None)
        if best is None:
            return parts
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(text=st.text("abc ", min_size=1))
def test_sentencepiece_merges_by_score(spm: Tokenizer, text: str):
    ids = spm.encode(text, add_special_tokens=False)
    assert [spm.backend.id_to_token(i) for i in ids] == merge_by_score(text)


@given(text=st.text())
def test_sentencepiece_spells_rare_characters_in_bytes(spm: Tokenizer, text: str):
    text = text.replace("▁", "")  # stands for a space
    ids = spm.encode(text, add_special_tokens=False)
    prefix = b" " if text else b""
    assert b"".join(map(spm.token_bytes, ids)) == prefix + text.encode()
    assert spm.decode(ids) == text


def test_sentencepiece_adds_a_begin_and_a_space_unless_told_otherwise(
    spm: Tokenizer, tmp_path: Path
):
    assert pieces(spm, "ab") == ["<s>", " ab"]
    plain = sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False)
    assert pieces(plain, "ab") == ["ab"]
    assert plain.decode(plain.encode(" ab")) == " ab"


def test_old_files_without_token_types_are_plain_text(tmp_path: Path):
    tokenizer = sentencepiece(tmp_path, token_type=None, unknown_token_id=None)
    assert tokenizer.special_ids == frozenset()
    assert pieces(tokenizer, "a") == ["<s>", " a"]
