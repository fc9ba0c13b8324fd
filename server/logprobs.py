"""Log probabilities in the two formats of the API: completions' parallel lists, chat's objects."""

import math
from collections.abc import Sequence
from typing import Any

from paged.models.tokenizer import Tokenizer
from paged.scheduler.output import Logprob, PositionLogprobs
from paged.scheduler.text_decoder import TextDecoder

# JSON has no infinities; the reference sends this for a token that cannot be sampled.
_NO_CHANCE = -9999.0


class CompletionLogprobs:
    """Builds the `logprobs` object of one choice, piece by piece in a stream.

    Tokens are spelt so that they join to the text: one that ends inside a character is "", and
    the one that completes the character has all of it. Offsets count characters of these tokens
    and continue over the pieces.

    Args:
      tokenizer: spells a token that has no log probability, which is a prompt's first.
      as_token_ids: spell tokens `token_id:123` instead.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._offset = 0

    def body(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Return the object for the next tokens."""
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is None:
                token = self._spell_first(token_id)
                for name, value in (
                    ("text_offset", self._offset),
                    ("token_logprobs", None),
                    ("tokens", token),
                    ("top_logprobs", None),
                ):
                    result[name].append(value)
                self._offset += len(token)
                continue
            token = self._spell(token_id, position[token_id])
            top: dict[str, float] = {}
            for other_id, logprob in position.items():
                # Different ids may be spelt alike: the more likely one, which comes first, stays.
                top.setdefault(self._spell(other_id, logprob), _finite(logprob.logprob))
            result["text_offset"].append(self._offset)
            result["token_logprobs"].append(_finite(position[token_id].logprob))
            result["tokens"].append(token)
            result["top_logprobs"].append(top)
            self._offset += len(token)
        return result

    def _spell_first(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        # As all others: if it ends inside a character, the token that completes that has all of it.
        return TextDecoder(self._tokenizer, (), skip_special_tokens=False).step(token_id)

    def _spell(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else logprob.decoded_token


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    *,
    num_top: int,
    as_token_ids: bool,
) -> dict[str, Any]:
    """Return the `logprobs` object of chat: one entry per token, with its exact bytes.

    Args:
      tokenizer: knows the bytes of each token; they join to the UTF-8 of the text.
      token_ids: the sampled tokens.
      positions: their candidates, the sampled one first.
      num_top: most candidates to list per token, the sampled one included.
      as_token_ids: spell tokens `token_id:123`.
    """

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        token = f"token_id:{token_id}" if as_token_ids else data.decode("utf-8", "replace")
        return {"token": token, "logprob": _finite(logprob.logprob), "bytes": list(data)}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        candidates = list(position.items())[:num_top]
        top = [entry(other_id, logprob) for other_id, logprob in candidates]
        content.append({**entry(token_id, position[token_id]), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs_body(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return the `prompt_logprobs` of an answer: by position, by token id; None if not wanted."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in position.items()
        }
        for position in positions
    ]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_CHANCE
