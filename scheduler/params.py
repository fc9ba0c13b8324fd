"""`SamplingParams`: how one request wants its tokens chosen, validated at construction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from paged.scheduler.structured.params import StructuredOutputs

from paged.scheduler.repetition import RepetitionDetection

MAX_STOP_STRINGS = 64
"""Most stop strings of one request (the HTTP interface allows 4, as OpenAI documents)."""

MAX_PACKED_EDITS = 64
"""Most token ids whose logits a request changes on the short way, with every step's other inputs;
what changes more takes the long way (`paged.scheduler.wide_edits`)."""

MAX_LOGIT_BIASES = 1024
"""Most biases of one request (OpenAI documents 300); a static shape of the compiled step."""

MAX_ALLOWED_TOKEN_IDS = 2**18
"""Most token ids of an allow-list: all of the largest vocabularies."""

MAX_STOP_TOKEN_IDS = 1024
"""Most token ids that end one request."""

MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_LENGTH = 65536
"""Most bad words of one request, and characters of all of them: they are tokenized at admission."""

MAX_LOGPROBS = 20
"""Most alternatives per position, OpenAI's limit; a static shape of the compiled step."""

MAX_LOGPROB_TOKEN_IDS = 128
"""Most token ids that one request may name to learn their log probabilities."""

MAX_N = 128
"""Most samples of one request."""

type Pooling = Literal["last", "mean"]
"""Which of a prompt's hidden states make its vector, see `PoolingParams`."""

POOLINGS: tuple[Pooling, ...] = ("last", "mean")

# The device has 32-bit numbers. Beyond these bounds nothing changes any more: no vocabulary is as
# large, no token's probability as small, and a penalty of a logit as large decides alone.
_MAX_TOP_K = 2**31 - 1
_MIN_TOP_P = 1e-7
_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-30, 1e30

# Below this a temperature only amplifies rounding; the reference raises it too.
_MIN_TEMPERATURE = 0.01
_GREEDY_BELOW = 1e-5


class ParameterError(ValueError):
    """A request parameter has a value that cannot be served; names the parameter."""

    def __init__(self, parameter: str, value: object, rule: str) -> None:
        self.parameter = parameter
        self.value = value
        self.rule = rule
        super().__init__(f"{parameter} {rule}, got {_shorten(value)}.")


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, defaults and ranges.

    Attributes:
      n: samples per prompt; with greedy decoding only 1 makes sense and more is refused.
      temperature: 0 is greedy; otherwise logits are divided by it, in [0, 2].
      top_p: smallest set of tokens whose probability reaches it, in (0, 1].
      top_k: most likely tokens kept; 0 or -1 keeps all.
      min_p: least probability relative to the best token's, in [0, 1].
      presence_penalty, frequency_penalty: subtracted once, or per occurrence, from the logits
        of tokens already generated, in [-2, 2].
      repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
        or the output; greater than 0.
      seed: makes the draw reproducible; sample i of `n` uses `seed + i`.
      stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
      stop_token_ids: token ids that end the text.
      ignore_eos: continue past end-of-sequence tokens.
      max_tokens: most tokens to generate; None means up to `max_model_len`.
      min_tokens: stop tokens cannot be sampled, and stop strings do not count, before it.
      logprobs: alternatives to report per position; 0 reports the sampled token only.
      prompt_logprobs: alternatives to report per prompt token; 0 reports the prompt's own only.
        The prompt is then computed whole: nothing of it is taken from the prefix cache.
      logprob_token_ids: tokens whose log probabilities to report per position, beside the sampled
        token's; they take the place of the alternatives of `logprobs`.
      logit_bias: added to the logits of these token ids, clamped to [-100, 100].
      allowed_token_ids: if given, nothing else can be sampled.
      bad_words: texts that must not be generated (compared as token sequences).
      repetition_detection: ends a text that goes round in circles, once it has `min_tokens`.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the matched stop string, or stop token, in the text.
      structured_outputs: what the output must look like; None: anything.

    Raises:
      ParameterError: naming the parameter, its value and the rule.

    Source: vLLM `sampling_params.py`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: "StructuredOutputs | None" = None
    _stop: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        _check_integer("n", self.n, low=1, high=MAX_N)
        _check_number("temperature", self.temperature, low=0.0, high=2.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_integer("top_k", self.top_k, low=-1)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, low_open=True)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        chosen = (
            self._checked_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            or None
        )
        if chosen is not None:
            self._set("logprobs", 0)
        self._set("logprob_token_ids", chosen)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        self._set("_stop", self._checked_stop())
        stop_ids = self._checked_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._set("stop_token_ids", stop_ids or ())
        allowed = self._checked_ids(
            "allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS
        )
        if allowed is not None and not allowed:
            raise ParameterError("allowed_token_ids", self.allowed_token_ids, "must not be empty")
        self._set("allowed_token_ids", allowed)
        self._set("logit_bias", self._checked_bias())
        self._check_bad_words()
        self._normalise_temperature()
        self._clip_to_device()
        if self.is_greedy and self.n > 1:
            raise ParameterError("n", self.n, "must be 1 when temperature is 0")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def is_pooled(self) -> bool:
        """Whether a vector is wanted rather than tokens, see `PoolingParams`."""
        return False

    @property
    def pools_prompt(self) -> bool:
        """Whether all tokens of the prompt go into that vector."""
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return self._stop

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _normalise_temperature(self) -> None:
        """Raise tiny temperatures; a greedy request needs no truncation."""
        if self.temperature < _GREEDY_BELOW:
            for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0)):
                self._set(name, neutral)
            self._set("min_p", 0.0)
        elif self.temperature < _MIN_TEMPERATURE:
            self._set("temperature", _MIN_TEMPERATURE)
        if self.top_k == -1:
            self._set("top_k", 0)

    def _clip_to_device(self) -> None:
        """Bring into the range of 32-bit numbers what means the same there."""
        self._set("top_k", min(self.top_k, _MAX_TOP_K))
        self._set("top_p", max(self.top_p, _MIN_TOP_P))
        penalty = min(
            max(self.repetition_penalty, _MIN_REPETITION_PENALTY), _MAX_REPETITION_PENALTY
        )
        self._set("repetition_penalty", penalty)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", self.stop, f"must hold at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", self.stop, "must hold non-empty strings")
        return stop

    def _checked_ids(
        self, name: str, ids: Sequence[int] | None, limit: int
    ) -> tuple[int, ...] | None:
        if ids is None:
            return None
        # Lists may be long: the loop that finds the culprit runs only if there is one.
        if set(map(type, ids)) - {int} or (ids and min(ids) < 0):
            for token_id in ids:
                _check_integer(name, token_id, low=0)
        unique = tuple(dict.fromkeys(ids))
        if len(unique) > limit:
            raise ParameterError(name, f"{len(unique)} ids", f"must hold at most {limit} token ids")
        return unique

    def _checked_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        bias: dict[int, float] = {}
        for token_id, value in self.logit_bias.items():
            _check_integer("logit_bias", token_id, low=0)
            _check_number("logit_bias", value)
            bias[token_id] = min(100.0, max(-100.0, float(value)))
        return bias

    def _check_bad_words(self) -> None:
        words = () if self.bad_words is None else tuple(self.bad_words)
        if isinstance(self.bad_words, str) or not all(isinstance(w, str) and w for w in words):
            raise ParameterError("bad_words", self.bad_words, "must hold non-empty strings")
        length = sum(map(len, words))
        if len(words) > MAX_BAD_WORDS or length > MAX_BAD_WORDS_LENGTH:
            raise ParameterError(
                "bad_words",
                f"{len(words)} of {length} characters",
                f"must hold at most {MAX_BAD_WORDS} strings, of {MAX_BAD_WORDS_LENGTH} characters "
                "in all",
            )
        self._set("bad_words", words)


@dataclass(frozen=True, slots=True)
class PoolingParams(SamplingParams):
    """Asks for a vector made of the prompt's final hidden states instead of a text.

    To the scheduler it is a request that ends with its prefill: one token, the likeliest, whatever
    it is. The vector is `RequestOutput.pooled`.

    Attributes:
      pooling: "last" takes the last token's, "mean" the mean of all. For the mean the whole prompt
        is computed, also what is cached: the cache has no hidden states.

    Raises:
      ParameterError: as `SamplingParams`, or for another `pooling`.
    """

    temperature: float = 0.0
    max_tokens: int | None = 1
    ignore_eos: bool = True
    pooling: Pooling = "last"

    def __post_init__(self) -> None:
        # Not super(): a class with slots is not the one that this method was written in.
        SamplingParams.__post_init__(self)
        if self.pooling not in POOLINGS:
            raise ParameterError("pooling", self.pooling, f"must be one of {', '.join(POOLINGS)}")

    @property
    def is_pooled(self) -> bool:
        """Whether a vector is wanted rather than tokens."""
        return True

    @property
    def pools_prompt(self) -> bool:
        """Whether all tokens of the prompt go into that vector."""
        return self.pooling == "mean"


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    upper = "" if high is None else f" and at most {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(name, value, "must be an integer")
    if value < low or (high is not None and value > high):
        raise ParameterError(name, value, f"must be at least {low}{upper}")


def _check_number(
    name: str,
    value: object,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ParameterError(name, value, "must be a finite number")
    too_low = low is not None and (value < low or (low_open and value == low))
    if too_low or (high is not None and value > high):
        bounds = f"{'(' if low_open else '['}{low:g}, " + ("inf)" if high is None else f"{high:g}]")
        raise ParameterError(name, value, f"must be in {bounds}")
