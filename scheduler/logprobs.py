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
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = TextDecoder(tokenizer, prompt_token_ids, skip_special_tokens=False)

    def build(
        self, token_ids: Sequence[int], logprobs: RunnerLogprobs, row: int
    ) -> tuple[PositionLogprobs, ...]:
        """Return one mapping per token of row `row`, the sampled token first in each."""
        return tuple(self._position(token_id, logprobs, row) for token_id in token_ids)

    def _position(self, token_id: int, logprobs: RunnerLogprobs, row: int) -> PositionLogprobs:
        text = self._decoder.step(token_id)
        position = {token_id: Logprob(float(logprobs.sampled[row]), int(logprobs.ranks[row]), text)}
        for rank in range(self._num_top):
            other = int(logprobs.top_ids[row, rank])
            if other not in position:
                position[other] = Logprob(
                    float(logprobs.top[row, rank]), rank + 1, self._tokenizer.token_text(other)
                )
        return position
