"""`InputProcessor`: from a prompt and sampling parameters to the requests that are scheduled.

Everything a caller can get wrong is refused here, on the caller's thread and before any block is
touched; what passes can be served.
"""

import dataclasses
import random
import time
from collections.abc import Collection, Sequence

from paged.models.tokenizer import Tokenizer
from paged.scheduler.logit_edits import make_logit_edits
from paged.scheduler.lora_store import Adapter
from paged.scheduler.params import ParameterError, SamplingParams
from paged.scheduler.request import CacheMode, Request
from paged.scheduler.structured.compiler import Grammar

_CACHE_MODES = {mode.value: mode for mode in CacheMode}
# The reference's type of a priority; bounded, so that nobody queues integers of a megabyte.
_MAX_PRIORITY = 2**63 - 1


def parse_cache_mode(name: object) -> CacheMode:
    """Return the cache mode of this name; None is the default mode.

    Raises: ParameterError for anything that is no name of a mode.
    """
    if name is None:
        return CacheMode.DEFAULT
    mode = _CACHE_MODES.get(name) if isinstance(name, str) else None
    if mode is None:
        raise ParameterError("cache", name, f"must be one of {', '.join(_CACHE_MODES)}")
    return mode


class InputProcessor:
    """Turns user requests into schedulable ones.

    Args:
      tokenizer: of the model; its end-of-sequence ids stop requests.
      vocab_size: size of the logits; prompt ids must be below it.
      max_model_len: longest prompt plus output, tokens.
      eos_token_ids: end-of-sequence ids beyond the tokenizer's own.
      seed: seeds the requests that bring no seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_id = tokenizer.eos_token_id
        every_eos = {*tokenizer.eos_token_ids, *eos_token_ids}
        self._other_eos = frozenset(every_eos - {self._eos_token_id})
        self._random = random.Random(seed)

    def process(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        cache_mode: CacheMode = CacheMode.DEFAULT,
        priority: int = 0,
        arrival_time: float | None = None,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """Return the `params.n` requests of one user request.

        Args:
          request_id: id of the user request; sample i of several gets `{i}_{request_id}`.
          prompt_token_ids: ids of the prompt.
          params: sampling parameters.
          cache_salt: prefix-cache isolation.
          cache_mode: what the request leaves behind in the prefix cache.
          priority: lower is more urgent; counts under the priority policy only.
          arrival_time: monotonic seconds; now if None.
          grammar: what `params.structured_outputs` asks for, compiled.
          adapter: what the model's linear layers have added to them; None: nothing.

        Raises:
          ParameterError: for an empty or too long prompt, an id outside the vocabulary, a
            `max_tokens` beyond `max_model_len`, too many logit edits, or a priority beyond 64
            bits.
        """
        if not -_MAX_PRIORITY - 1 <= priority <= _MAX_PRIORITY:
            raise ParameterError("priority", priority, "must fit into 64 bits")
        prompt = tuple(prompt_token_ids)
        max_tokens = self._checked_lengths(prompt, params)
        eos = None if params.ignore_eos else self._eos_token_id
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self._other_eos
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logprob_token_ids", params.logprob_token_ids)
        held_back = {*stop_ids, *self._other_eos}
        if self._eos_token_id is not None:
            held_back.add(self._eos_token_id)
        edits = make_logit_edits(
            params,
            vocab_size=self._vocab_size,
            stop_ids=sorted(held_back),
            bad_words=self._bad_word_ids(params),
        )
        arrival = time.monotonic() if arrival_time is None else arrival_time
        # What is not sampled has no log probabilities, obeys no edits and may hide a stop string.
        jumps = params.logprobs is None and edits is None and not params.stop_strings
        child_params = params if params.n == 1 else dataclasses.replace(params, n=1)
        # One of the samples scores the prompt they share.
        later_params = child_params
        if child_params.prompt_logprobs is not None:
            later_params = dataclasses.replace(child_params, prompt_logprobs=None)
        requests = []
        for index in range(params.n):
            seed = self._random.getrandbits(64) if params.seed is None else params.seed + index
            requests.append(
                Request(
                    request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                    prompt_token_ids=prompt,
                    params=later_params if index else child_params,
                    max_tokens=max_tokens,
                    eos_token_id=eos,
                    stop_token_ids=stop_ids,
                    seed=seed,
                    logit_edits=edits,
                    constraint=None if grammar is None else grammar.start(jumps=jumps),
                    cache_salt=cache_salt,
                    adapter=adapter,
                    cache_mode=cache_mode,
                    priority=priority,
                    parent_id=request_id,
                    index=index,
                    num_samples=params.n,
                    arrival_time=arrival,
                )
            )
        return requests

    def _checked_lengths(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """Check prompt and limits; return the most tokens the request may generate."""
        limit = self._max_model_len
        if not prompt:
            raise ParameterError("prompt", list(prompt), "must hold at least one token")
        if len(prompt) >= limit:
            raise ParameterError(
                "prompt",
                f"{len(prompt)} tokens",
                f"must be shorter than the model's context of {limit} tokens, with room for at "
                "least one output token; shorten it or raise --max-model-len",
            )
        bad = next((i for i in prompt if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            raise ParameterError(
                "prompt", bad, f"must hold token ids in [0, {self._vocab_size - 1}]"
            )
        if params.max_tokens is None:
            room = limit - len(prompt)
            if params.min_tokens > room:
                raise ParameterError(
                    "min_tokens",
                    params.min_tokens,
                    f"must not exceed the {room} tokens that are left after the prompt",
                )
            return room
        if params.max_tokens > limit:
            raise ParameterError(
                "max_tokens", params.max_tokens, f"must not exceed max_model_len={limit}"
            )
        return min(params.max_tokens, limit - len(prompt))

    def _check_ids(self, name: str, ids: Sequence[int] | None) -> None:
        for token_id in ids or ():
            if token_id >= self._vocab_size:
                raise ParameterError(
                    name,
                    token_id,
                    f"must hold ids below the vocabulary size {self._vocab_size}",
                )

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Return each bad word's token sequence, as it is and after a space (as the reference).

        White space alone is forbidden as it is written.
        """
        sequences: list[list[int]] = []
        for word in params.bad_words or ():
            text = word.lstrip()
            bare = self._tokenizer.encode(text or word, add_special_tokens=False)
            if not bare:
                continue
            sequences.append(bare)
            spaced = self._tokenizer.encode(" " + text, add_special_tokens=False) if text else []
            if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return sequences
