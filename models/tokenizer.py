"""`Tokenizer`: text to token ids and back, with the special tokens of a checkpoint."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged.models.errors import CheckpointError
from paged.models.json_file import read_json

# Only the batch calls of `tokenizers` release the interpreter lock, which `encode` holds for over
# a second with a megabyte of text; up to this length it takes less than 20 ms.
_LONG_CHARS = 20_000


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and the chat template of its checkpoint.

    Two kinds of vocabulary are understood, those of language models in use: byte-level ones
    (GPT-2, Llama 3, Qwen), and ones whose space is "▁" and whose rare characters are byte tokens
    such as "<0xE3>" (SentencePiece: Llama 2, Mistral, Gemma).

    Args:
      backend: the tokenizer; its padding and truncation are turned off.
      bos_token, eos_token: text of the special tokens; one that has no id counts as absent.
      eos_token_ids: ids beyond that of `eos_token` that end a text.
      chat_template: Jinja source.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      bos_token, eos_token: text of the special tokens, or None.
      bos_token_id, eos_token_id: their ids, or None.
      eos_token_ids: every id that ends a text.
      special_ids: ids that `decode` leaves out when told to skip special tokens.
      chat_template: Jinja source, or None.

    Raises:
      CheckpointError: if the vocabulary is of neither kind.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation of its training: prompts would lose their end.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token, self.bos_token_id = _token_and_id(backend, bos_token)
        self.eos_token, self.eos_token_id = _token_and_id(backend, eos_token)
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset([*own, *eos_token_ids])
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.chat_template = chat_template
        self._is_byte_level = _is_byte_level(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Return the tokenizer of a Hugging Face checkpoint directory.

        Reads tokenizer.json, and where they exist tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja or chat_template.json, and the end-of-sequence ids of
        generation_config.json (config.json where there is none).

        Raises:
          CheckpointError: if tokenizer.json is missing or a file cannot be read.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{directory}: has no tokenizer.json; save the tokenizer there in the fast format "
                "of Hugging Face (AutoTokenizer.from_pretrained(...).save_pretrained(...))."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more specific
            raise CheckpointError(
                f"{file}: is no tokenizer that can be read ({error}); fetch the checkpoint again."
            ) from None
        config = read_json(directory / "special_tokens_map.json")
        config |= read_json(directory / "tokenizer_config.json")
        return cls(
            backend,
            bos_token=_token_content(config.get("bos_token")),
            eos_token=_token_content(config.get("eos_token")),
            eos_token_ids=_eos_token_ids(directory),
            chat_template=_chat_template(directory, config),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's head may have more rows."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it become their ids.

        Other threads run meanwhile if the text is long.

        Args:
          text: any text.
          add_special_tokens: also add what the checkpoint puts around a text, such as a
            begin-of-sequence token.

        Raises:
          ValueError: if the text has a lone surrogate, which is no character.
        """
        try:
            if len(text) <= _LONG_CHARS:
                encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self.backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except TypeError:
            if (match := re.search("[\ud800-\udfff]", text)) is None:
                raise
            raise ValueError(
                f"The text has a lone surrogate (U+{ord(match[0]):04X}) at position "
                f"{match.start()}, which is no character; remove it."
            ) from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it stands inside a text; see `token_bytes`."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that one token stands for; none for an id without a token.

        A text is the concatenation of its tokens' bytes: characters may be split between tokens.
        """
        if (known := self._bytes.get(token_id)) is None:
            token = self.backend.id_to_token(token_id)
            known = b"" if token is None else self._bytes_of(token)
            self._bytes[token_id] = known
        return known

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return which character of a byte-level vocabulary stands for which byte.

    Bytes that print stand for themselves as Latin-1, the others are numbered from U+0100.
    Source: GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder: dict[str, Any] = {"type": None}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    kinds = [step["type"] for step in decoder.get("decoders", [decoder])]
    if "ByteLevel" in kinds:
        return True
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return False
    raise CheckpointError(
        f"The tokenizer's decoder {kinds} is not supported; supported are byte-level ones "
        "(ByteLevel) and SentencePiece's (ByteFallback, Metaspace)."
    )


def _token_and_id(
    backend: tokenizers.Tokenizer, token: str | None
) -> tuple[str | None, int | None]:
    token_id = None if token is None else backend.token_to_id(token)
    return (None, None) if token_id is None else (token, token_id)


def _token_content(value: Any) -> str | None:
    """The text of a special token, which may be given as an object that says more about it."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _eos_token_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json(directory / name).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    # A file of its own where there is a processor of images beside the tokenizer.
    template = config.get("chat_template") or read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # named templates; "default" is the one for plain chats
        by_name = {row["name"]: row["template"] for row in template}
        template = by_name.get("default")
    return template
