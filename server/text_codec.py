"""Tokenizing for the server: what is long is done on a thread, so that streams go on meanwhile."""

import asyncio
from collections.abc import Sequence

from paged.models.tokenizer import Tokenizer
from paged.server.errors import ApiError

# Encoding runs at one to four megabytes a second: below this, it takes less than 20 ms.
_LONG_CHARS = 20_000
_LONG_TOKENS = 20_000


async def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text.

    Raises: ApiError for a lone surrogate, which a template's escapes can smuggle in.
    """

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    try:
        if sum(map(len, texts)) <= _LONG_CHARS:
            return encode_all()
        return await asyncio.to_thread(encode_all)
    except ValueError as error:
        raise ApiError(f"The text cannot be tokenized: {error}") from None


async def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, special tokens included."""
    if len(token_ids) <= _LONG_TOKENS:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    # The batch call is the one that releases the interpreter lock; a thread alone is no help.
    (text,) = await asyncio.to_thread(
        tokenizer.backend.decode_batch, [token_ids], skip_special_tokens=False
    )
    return str(text)
