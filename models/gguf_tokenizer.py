"""The tokenizer that GGUF metadata describes, rebuilt as a `tokenizers.Tokenizer`."""

import operator
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from paged.models.errors import CheckpointError
from paged.models.gguf_config import gguf_eos_token_ids
from paged.models.gguf_file import GGUFFile
from paged.models.tokenizer import Tokenizer


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Its ids are those of the original, except where the file leaves something out: an original
    that normalises text first (Qwen: NFC) gives other ids for decomposed characters.

    Raises:
      CheckpointError: if the vocabulary is of a kind that is not supported, or damaged.
    """
    metadata = file.metadata
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in _BUILDERS:
        raise CheckpointError(
            f"{file.path}: tokenizer model {kind!r} is not supported (supported: "
            f"{', '.join(_BUILDERS)}); pass the checkpoint as a Hugging Face directory."
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise CheckpointError(
            f"{file.path}: its vocabulary is empty or holds a token twice; fetch the file again "
            "or pass another one."
        )
    backend = _BUILDERS[kind](file, vocab)
    _add_special_tokens(backend, metadata, tokens)
    bos, eos = (_token(metadata, tokens, name) for name in ("bos", "eos"))
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata)):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocab[bos])]
        )
    return Tokenizer(
        backend,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=gguf_eos_token_ids(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


# --- byte-level vocabularies -------------------------------------------------------------------

# How the originals cut a text before merging; the regular expressions are those of the published
# tokenizer.json files.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# Of o200k, the vocabulary of GPT-4o and gpt-oss.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_words()])


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


# `tokenizer.ggml.pre` -> pre-tokenizer.
_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_words,
    "gpt-2": _gpt2_words,
    "gpt2": _gpt2_words,
    "smollm": _smollm_words,
    "llama-bpe": lambda: _words(_LLAMA3_WORDS),
    "llama3": lambda: _words(_LLAMA3_WORDS),
    "qwen2": lambda: _words(_QWEN2_WORDS),
    "gpt-4o": lambda: _words(_GPT4O_WORDS),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    pre = str(file.metadata.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported (supported: "
            f"{', '.join(_PRE_TOKENIZERS)}); pass the checkpoint as a Hugging Face directory."
        )
    # Llama 3 takes a word that is a token as it is, even where merges do not lead to it.
    model = BPE(vocab, _merges(file, vocab), ignore_merges=pre in _LLAMA3_NAMES)
    # No normalizer, since the file names none: llama.cpp has none either.
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in file.metadata.get("tokenizer.ggml.merges", []):
        left, _, right = line.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(
                f"{file.path}: merge {line!r} is not among its tokens; fetch the file again or "
                "pass another one."
            )
        merges.append((left, right))
    return merges


# --- SentencePiece vocabularies ----------------------------------------------------------------


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    metadata = file.metadata
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(vocab):
        raise CheckpointError(
            f"{file.path}: it has {len(vocab)} tokens and {len(scores)} scores; convert the "
            "checkpoint again or pass another file."
        )
    tokens = list(vocab)
    unknown = _token(metadata, tokens, "unknown")
    model = BPE(
        vocab,
        _merges_from_scores(tokens, scores, _token_types(metadata, tokens)),
        unk_token=unknown,
        fuse_unk=unknown is not None,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if adds_space else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return the merges that score-driven BPE amounts to.

    SentencePiece joins the neighbours whose union has the best score; so every way to cut a piece
    in two tokens is a merge, with the piece's score as its rank. (Of two cuts of one piece the
    first in this list goes first, where SentencePiece takes the leftmost in the text; Hugging
    Face's conversion does the same.)
    """
    mergeable = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    }
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        if token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges.sort(key=operator.itemgetter(0), reverse=True)
    return [(left, right) for _, left, right in merges]


_BUILDERS: Mapping[str, Callable[[GGUFFile, dict[str, int]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


# --- special tokens ----------------------------------------------------------------------------


def _add_special_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    types = _token_types(metadata, tokens)
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind != _TokenType.USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED, _TokenType.UNKNOWN)
    ]
    backend.add_tokens(added)


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    # Short of types (very old files have none), the rest is plain text.
    return [*types[: len(tokens)], *[_TokenType.NORMAL] * (len(tokens) - len(types))]


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None or token_id >= len(tokens) else tokens[token_id]


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a file that does not say so wants a begin-of-sequence token (llama.cpp's rule)."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
