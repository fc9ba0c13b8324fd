"""`GrammarCompiler`: grammars in the background, each within limits, and kept for the next request.

The library compiles without the interpreter lock and counts what it does (`LLParserLimits`), so a
hostile grammar ends in an error after a bounded time; what it delays are other grammars, not steps.
"""

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paged.models.sampling import mask_words
from paged.models.tokenizer import Tokenizer
from paged.scheduler.errors import QueueFullError
from paged.scheduler.structured.config import StructuredOutputsConfig
from paged.scheduler.structured.grammar_constraint import GrammarConstraint, first_line
from paged.scheduler.structured.grammar_text import constraint_source, grammar_text
from paged.scheduler.structured.json_numbers import NumberLength, NumberTokens
from paged.scheduler.structured.params import StructuredOutputs

logger = logging.getLogger(__name__)

_THREADS = 2
_MAX_WAITING = 256  # grammars

# Of one mask, a quarter of the library's default: some milliseconds, which the whole batch waits.
_STEP_LEXER_FUEL = 50_000
# Of 1 to 2 kB each, per sample; the library's default would be hundreds of megabytes.
_MAX_LEXER_STATES = 20_000


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar.

    Attributes:
      matcher: at its start; copied, never used.
      number_tokens: of the vocabulary, if there is JSON in the outputs.
      is_json: they are JSON as a whole.
    """

    matcher: LLMatcher
    number_tokens: NumberTokens | None = None
    is_json: bool = True

    def start(self, *, jumps: bool) -> GrammarConstraint:
        """Return the constraint of a sample without output."""
        number = None
        if self.number_tokens is not None:
            number = NumberLength(self.number_tokens, is_whole=self.is_json)
        return GrammarConstraint(self.matcher.deep_copy(), jumps=jumps, number=number)


@dataclass(slots=True)
class _Job:
    """A grammar on its way; `started` is None while it waits for a thread."""

    submitted: float
    started: float | None = None
    future: "concurrent.futures.Future[Grammar]" = field(init=False)


class GrammarCompiler:
    """Compiles what requests ask for (thread-safe).

    Args:
      make_tokenizer: makes the library's tokenizer, which may take seconds; called once.
      num_words: int32 words of a mask.
      config: limits.
      make_matcher: compiles a grammar in the language of the library.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        *,
        num_words: int,
        config: StructuredOutputsConfig,
        make_matcher: Callable[[LLTokenizer, str], LLMatcher] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._num_words = num_words
        self._config = config
        self._make_matcher = make_matcher or _make_matcher
        self._clock = clock
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "paged-grammar")
        self._lock = threading.Lock()
        self._tokenizer: concurrent.futures.Future[LLTokenizer] | None = None
        self._number_tokens: NumberTokens | None = None  # when there is a tokenizer
        self._ready_at = clock()  # moment when there was a tokenizer
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        # By grammar, and the field that errors name.
        self._jobs: dict[tuple[str, str], _Job] = {}

    @classmethod
    def of_model(
        cls,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        config: StructuredOutputsConfig,
    ) -> "GrammarCompiler":
        """Return the compiler of a model.

        Args:
          tokenizer: of the model.
          vocab_size: size of the logits, which may exceed that of the tokenizer.
          eos_token_ids: what may be sampled where the grammar accepts; beyond the tokenizer's own.
          config: limits.
        """
        eos = sorted({*tokenizer.eos_token_ids, *eos_token_ids})

        def make() -> LLTokenizer:
            text = tokenizer.backend.to_str()
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos or None)

        return cls(make, num_words=mask_words(vocab_size), config=config)

    def start_loading(self) -> None:
        """Begin to make the tokenizer, on a thread of its own."""
        self._get_tokenizer()

    def wait_until_loaded(self) -> None:
        """Return when there is a tokenizer: making it holds the interpreter lock for seconds.

        One that the library cannot read is reported, and refuses all grammars.
        """
        error = self._get_tokenizer().exception()
        if error is not None:
            logger.warning("Structured outputs are refused: %s.", error)

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Return the grammar, waiting for it.

        Raises:
          ParameterError: if it is too large, takes too long or has something unsupported.
          QueueFullError: if too many others wait.
        """
        job = self._find(outputs)
        if isinstance(job, Grammar):
            return job
        concurrent.futures.wait([self._get_tokenizer()])
        while not job.future.done():
            concurrent.futures.wait([job.future], self._patience(job, outputs))
        return job.future.result()

    async def compile_async(self, outputs: StructuredOutputs) -> Grammar:
        """Do what `compile` does without blocking the event loop."""
        job = self._find(outputs)
        if isinstance(job, Grammar):
            return job
        # `asyncio.wait` cancels nothing: others may wait for the same.
        await asyncio.wait([_watched(self._get_tokenizer())])
        done = _watched(job.future)
        while not done.done():
            await asyncio.wait([done], timeout=self._patience(job, outputs))
        return done.result()

    def close(self) -> None:
        """Forget what waits; what is being compiled ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, outputs: StructuredOutputs) -> "Grammar | _Job":
        """Return the grammar if it is there, else the job that makes it."""
        key = constraint_source(outputs, self._config)
        with self._lock:
            grammar = self._compiled.get(key)
            if grammar is not None:
                self._compiled.move_to_end(key)
                return grammar
            job = self._jobs.get((key, outputs.source))
            if job is None:
                if len(self._jobs) >= _MAX_WAITING:
                    raise QueueFullError(
                        f"{len(self._jobs)} grammars wait to be compiled; try again later."
                    )
                job = self._jobs[key, outputs.source] = _Job(self._clock())
                job.future = self._pool.submit(self._run, key, job, outputs)
            return job

    def _get_tokenizer(self) -> "concurrent.futures.Future[LLTokenizer]":
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = concurrent.futures.Future()
                threading.Thread(target=self._load_tokenizer, daemon=True).start()
            return self._tokenizer

    def _load_tokenizer(self) -> None:
        assert self._tokenizer is not None
        try:
            tokenizer = self._make_tokenizer()
            self._number_tokens = NumberTokens(
                functools.cache(lambda token_id: tokenizer.decode_bytes([token_id])),
                vocab_size=tokenizer.vocab_size,
                num_words=self._num_words,
            )
            self._ready_at = self._clock()
            self._tokenizer.set_result(tokenizer)
        except Exception as error:
            self._tokenizer.set_exception(error)

    def _patience(self, job: _Job, outputs: StructuredOutputs) -> float:
        """Return how many seconds to wait for a job from now on.

        Raises: ParameterError if it has had its time; QueueFullError if it has not begun in time.
        """
        limit = self._config.compile_timeout
        since = max(job.submitted, self._ready_at) if job.started is None else job.started
        left = since + limit - self._clock()
        if left > 0 or job.future.done():
            return max(left, 0.0)
        if job.started is None:
            raise QueueFullError(
                "Other grammars are being compiled, and this one had no turn within "
                f"{limit:g} seconds; try again later."
            )
        raise outputs.refuse(
            f"must compile within {limit:g} seconds (compile_timeout of the server's "
            "structured_outputs_config); simplify it"
        )

    def _run(self, key: str, job: _Job, outputs: StructuredOutputs) -> Grammar:
        try:
            tokenizer = self._wait_for_tokenizer(outputs)
            job.started = self._clock()
            grammar = self._build(tokenizer, outputs)
            with self._lock:
                self._compiled[key] = grammar
                if len(self._compiled) > self._config.cache_size:
                    self._compiled.popitem(last=False)
            return grammar
        finally:
            with self._lock:
                del self._jobs[key, outputs.source]

    def _wait_for_tokenizer(self, outputs: StructuredOutputs) -> LLTokenizer:
        try:
            return self._get_tokenizer().result()
        except Exception as error:  # the library raises nothing more specific
            raise outputs.refuse(f"does not work with this model's tokenizer: {error}") from None

    def _build(self, tokenizer: LLTokenizer, outputs: StructuredOutputs) -> Grammar:
        text = grammar_text(outputs, self._config)
        matcher, mask = self._try(tokenizer, text)
        if matcher.is_error() or not mask.any():
            # Narrowed, a schema may be too complex, or contradict itself.
            as_given = grammar_text(outputs, self._config, narrows=False)
            if as_given != text:
                matcher, mask = self._try(tokenizer, as_given)
        if matcher.is_error():
            raise outputs.refuse(f"cannot be compiled: {first_line(matcher.get_error())}")
        if not mask.any():
            raise outputs.refuse("allows no output at all")
        is_json = outputs.kind in ("json", "json_object")
        has_json = is_json or outputs.kind == "structural_tag" or bool(outputs.schemas)
        return Grammar(matcher, self._number_tokens if has_json else None, is_json)

    def _try(self, tokenizer: LLTokenizer, text: str) -> tuple[LLMatcher, np.ndarray]:
        """Return the matcher of a grammar, and its first mask, int32 `[num_words]`.

        The mask shows what compiling alone does not: a grammar too large to run, or one that
        nothing matches. The copies have what was computed for it.
        """
        matcher = self._make_matcher(tokenizer, text)
        mask = np.zeros(self._num_words, np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return matcher, mask


def _watched[T](future: "concurrent.futures.Future[T]") -> asyncio.Future[T]:
    """Return a future of the event loop; an error that nobody waits for any more is not logged."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return wrapped


def _make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    limits = LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
