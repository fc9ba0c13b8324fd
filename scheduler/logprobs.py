"""`LogprobsBuilder`: rows of device log probabilities into what a caller reads."""

from collections.abc import Sequence

from paged.models.tokenizer import Tokenizer
from paged.scheduler.output import Logprob, PositionLogprobs, RunnerLogprobs
from paged.scheduler.text_decoder import TextDecoder


class LogprobsBuilder:
    """Builds the log probabilities of one sample, token by token.

    The text of a sampled token is what it adds to the output, so the texts join to the whole: a
    token that ends inside a character has the text "", and the one that completes it the
    character. An alternative is decoded alone.

    Args:
      tokenizer: of the model.
      prompt_token_ids: ids of the prompt, so that leading spaces come out right.
      num_top: alternatives per position.
      chosen_ids: tokens to report at every position, whatever their rank.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        num_top: int,
        chosen_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._chosen_ids = chosen_ids
        self._decoder = TextDecoder(tokenizer, prompt_token_ids, skip_special_tokens=False)

    def build(
        self,
        token_ids: Sequence[int],
        logprobs: RunnerLogprobs,
        row: int,
        chosen: RunnerLogprobs | None = None,
    ) -> tuple[PositionLogprobs, ...]:
        """Return one mapping per token of row `row`, the sampled token first in each.

        `chosen` has the log probabilities of the chosen tokens, in their order.
        """
        return tuple(self._position(token_id, logprobs, row, chosen) for token_id in token_ids)

    def _position(
        self, token_id: int, logprobs: RunnerLogprobs, row: int, chosen: RunnerLogprobs | None
    ) -> PositionLogprobs:
        text = self._decoder.step(token_id)
        position = _candidates(self._tokenizer, token_id, text, logprobs, row, self._num_top)
        if chosen is not None:
            for index, other in enumerate(self._chosen_ids):
                if other not in position:
                    position[other] = Logprob(
                        float(chosen.sampled[index]),
                        int(chosen.ranks[index]),
                        self._tokenizer.token_text(other),
                    )
        return position


class PromptLogprobsBuilder:
    """Builds the log probabilities of a prompt's tokens, part by part.

    Texts are as `LogprobsBuilder` has them: they join to the prompt's text.

    Args:
      tokenizer: of the model.
      prompt_token_ids: ids of the prompt.
      num_top: alternatives per position.

    Attributes:
      positions: one mapping per token, the token itself first; None for the first token, which
        nothing comes before, and for those that are not known yet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], num_top: int) -> None:
        self.positions: list[PositionLogprobs | None] = [None] * len(prompt_token_ids)
        self._token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._num_top = num_top
        decoder = TextDecoder(tokenizer, (), skip_special_tokens=False)
        self._texts = [decoder.step(token_id) for token_id in prompt_token_ids]

    def add(self, start: int, logprobs: RunnerLogprobs) -> None:
        """Take in the tokens from position `start` on; a part may come again after a preemption."""
        for row in range(len(logprobs.sampled)):
            position = start + row
            self.positions[position] = _candidates(
                self._tokenizer,
                self._token_ids[position],
                self._texts[position],
                logprobs,
                row,
                self._num_top,
            )


def _candidates(
    tokenizer: Tokenizer,
    token_id: int,
    text: str,
    logprobs: RunnerLogprobs,
    row: int,
    num_top: int,
) -> dict[int, Logprob]:
    """Return the token itself and the `num_top` likeliest ones."""
    position = {token_id: Logprob(float(logprobs.sampled[row]), int(logprobs.ranks[row]), text)}
    for rank in range(num_top):
        other = int(logprobs.top_ids[row, rank])
        if other not in position:
            position[other] = Logprob(
                float(logprobs.top[row, rank]), rank + 1, tokenizer.token_text(other)
            )
    return position
