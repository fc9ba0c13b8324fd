"""`OutputProcessor`: the tokens of a step into deltas of text; finds stop strings on the way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from paged.models.tokenizer import Tokenizer
from paged.scheduler.deltas import Delta, ParentRequest
from paged.scheduler.detokenizer import IncrementalDetokenizer
from paged.scheduler.logprobs import LogprobsBuilder, PromptLogprobsBuilder
from paged.scheduler.output import (
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    RunnerLogprobs,
)
from paged.scheduler.request import Request
from paged.scheduler.step_rows import StepUpdates
from paged.scheduler.text_decoder import TextDecoder


class Finish(Protocol):
    """Ends a request and frees its blocks."""

    def __call__(self, request: Request, reason: FinishReason, stop_reason: str) -> None:
        """`stop_reason` is the stop string that ended it."""
        ...


@dataclass(slots=True, eq=False)
class _Sample:
    """What is kept for one unfinished sample beside its request.

    Attributes:
      request, parent: the sample and what it is a sample of.
      streams: somebody wants its tokens as they come; otherwise all come with its end.
      decoder: its text, None if it has stop strings.
      detokenizer: its text, if it has stop strings.
      logprobs: its log probabilities, if they are wanted.
      positions: log probabilities that no delta has yet.
      is_silent: nothing is done about its tokens before it ends.
      step: token to text, if that is all that is done about its tokens before it ends.
    """

    request: Request
    parent: ParentRequest
    streams: bool
    decoder: TextDecoder | None
    detokenizer: IncrementalDetokenizer | None
    logprobs: LogprobsBuilder | None
    positions: list[PositionLogprobs] = field(default_factory=list)

    is_silent: bool = field(init=False)
    step: Callable[[int], str] | None = field(init=False)

    def __post_init__(self) -> None:
        is_plain = self.detokenizer is None and self.logprobs is None
        is_plain &= self.request.params.repetition_detection is None
        self.is_silent = is_plain and not self.streams
        self.step = None
        if is_plain and self.streams and self.decoder is not None:
            self.step = self.decoder.step


class OutputProcessor:
    """What callers get to see of the samples that run (mutable).

    Tokens that nobody waits for cost nothing until their sample ends: their text is decoded at
    once then, unless a stop string has to be found in it (docs/decisions/0025).

    Args:
      tokenizer: of the model.
      finish: ends a request at a stop string.
      on_end: told of every sample that has ended.

    Source: vLLM `v1/engine/output_processor.py`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, finish: Finish, on_end: Callable[[Request], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._finish = finish
        self._on_end = on_end
        self._samples: dict[str, _Sample] = {}
        self._parents: dict[str, ParentRequest] = {}
        self._prompts: dict[str, PromptLogprobsBuilder] = {}  # by the id of the sample
        self._num_audible = 0  # samples that are not silent

    def __len__(self) -> int:
        """Return the number of unfinished samples."""
        return len(self._samples)

    @property
    def parent_ids(self) -> list[str]:
        """Ids of the unfinished user requests."""
        return list(self._parents)

    def check_ids(self, requests: Sequence[Request]) -> None:
        """Refuse samples of a new user request whose ids are in use.

        Raises: ValueError.
        """
        parent_id = requests[0].parent_id
        taken = [r.request_id for r in requests if r.request_id in self._samples]
        if taken or parent_id in self._parents:
            used = taken[0] if taken else parent_id
            raise ValueError(f"Request {used!r} is not finished yet; use another request_id.")

    def add(self, requests: Sequence[Request], prompt: str | None, *, stream: bool) -> None:
        """Take in the samples of one user request.

        Args:
          requests: one per sample; their ids are free.
          prompt: the prompt's text, handed back in the outputs.
          stream: hand out tokens as they come.
        """
        first = requests[0]
        parent = ParentRequest(first.parent_id, prompt, first.prompt_token_ids)
        self._parents[parent.request_id] = parent
        for request in requests:
            parent.unfinished.add(request.request_id)
            sample = self._make_sample(request, parent, stream)
            self._samples[request.request_id] = sample
            self._num_audible += not sample.is_silent
            if request.params.prompt_logprobs is not None:
                prompt_builder = PromptLogprobsBuilder(
                    self._tokenizer, request.prompt_token_ids, request.params.prompt_logprobs
                )
                self._prompts[request.request_id] = prompt_builder
                parent.prompt_logprobs = prompt_builder.positions

    def take_prompt_logprobs(self, parts: Sequence[PromptLogprobs]) -> None:
        """Note log probabilities of prompts; call before `process` with those of the same step."""
        for part in parts:
            builder = self._prompts.get(part.request_id)
            if builder is not None:  # else it has been aborted
                builder.add(part.start, part.logprobs)

    def process(
        self,
        updates: StepUpdates,
        logprobs: RunnerLogprobs | None,
        chosen: Mapping[int, RunnerLogprobs] = MappingProxyType({}),
    ) -> list[Delta]:
        """Return the deltas of a step, in batch order.

        Args:
          updates: what the step has added to the requests.
          logprobs: of its samples, if some request wants them.
          chosen: of tokens that requests have named, by row.
        """
        samples = self._samples
        requests, token_ids = updates.requests, updates.token_ids
        for index in updates.firsts:
            _note_cached_tokens(samples[requests[index].request_id])
        deltas: list[Delta] = []
        indices: Sequence[int] = range(len(requests)) if self._num_audible else updates.ended
        for index in indices:
            request = requests[index]
            sample = samples[request.request_id]
            token_id = token_ids[index]
            if request.finish_reason is None:
                step = sample.step
                if step is not None and not updates.replaced:
                    deltas.append(Delta(sample.parent, request.index, step(token_id), (token_id,)))
                    continue
                if sample.is_silent:
                    continue
            new_token_ids = updates.new_token_ids(index)
            if sample.logprobs is not None and logprobs is not None:
                row = updates.rows[index]
                new = sample.logprobs.build(new_token_ids, logprobs, row, chosen.get(row))
                sample.positions += new
            delta = self._advance(sample, new_token_ids)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def abort(self, parent_id: str) -> list[Delta]:
        """Forget a user request, whose samples have been ended; return their last deltas."""
        parent = self._parents.get(parent_id)
        children = [] if parent is None else sorted(parent.unfinished)
        return [self._close(self._samples[child], ()) for child in children]

    def unfinished(self, parent_id: str) -> list[Request]:
        """Return the unfinished samples of a user request; none for an unknown id."""
        parent = self._parents.get(parent_id)
        children = [] if parent is None else sorted(parent.unfinished)
        return [self._samples[child].request for child in children]

    def _make_sample(self, request: Request, parent: ParentRequest, stream: bool) -> _Sample:
        params, tokenizer = request.params, self._tokenizer
        decoder = detokenizer = builder = None
        if params.stop_strings:
            detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop_strings=params.stop_strings,
                include_stop_str=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        else:
            decoder = TextDecoder(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        if params.logprobs is not None:
            builder = LogprobsBuilder(
                tokenizer,
                request.prompt_token_ids,
                params.logprobs,
                params.logprob_token_ids or (),
            )
        return _Sample(request, parent, stream, decoder, detokenizer, builder)

    def _advance(self, sample: _Sample, token_ids: tuple[int, ...]) -> Delta | None:
        """Return the delta of a sample's new tokens, looking for stop strings on the way."""
        request, detokenizer = sample.request, sample.detokenizer
        if detokenizer is not None and not _hides_last_token(request):
            matched = detokenizer.update(token_ids)
            if matched is not None:
                if request.is_finished:  # the step's token was also the last one allowed
                    request.finish_reason, request.stop_reason = FinishReason.STOP, matched
                else:
                    self._finish(request, FinishReason.STOP, matched)
        if not request.is_finished and _repeats_itself(request):
            self._finish(request, FinishReason.REPETITION, "repetition_detected")
        if request.is_finished:
            return self._close(sample, token_ids)
        if not sample.streams:
            return None
        if detokenizer is not None:
            text = detokenizer.take_text(finished=False)
        else:
            assert sample.decoder is not None
            text = "".join([sample.decoder.step(token_id) for token_id in token_ids])
        return Delta(sample.parent, request.index, text, token_ids, _take_positions(sample))

    def _close(self, sample: _Sample, new_token_ids: tuple[int, ...]) -> Delta:
        """Forget a finished sample and return its last delta, with all that it has kept back."""
        request, parent = sample.request, sample.parent
        del self._samples[request.request_id]
        self._prompts.pop(request.request_id, None)
        self._num_audible -= not sample.is_silent
        parent.unfinished.discard(request.request_id)
        if not parent.unfinished:
            del self._parents[parent.request_id]
        _note_cached_tokens(sample)
        self._on_end(request)
        token_ids = new_token_ids if sample.streams else tuple(request.output_token_ids)
        if sample.detokenizer is not None:
            text = sample.detokenizer.take_text(finished=True)
        else:
            assert sample.decoder is not None
            visible = token_ids[:-1] if _hides_last_token(request) else token_ids
            text = sample.decoder.decode(visible) + sample.decoder.flush()
        assert request.finish_reason is not None
        return Delta(
            parent,
            request.index,
            text,
            token_ids,
            _take_positions(sample),
            request.finish_reason.value,
            request.stop_reason,
            not parent.unfinished,
            request.pooled,
        )


def _hides_last_token(request: Request) -> bool:
    """Whether its last token is a stop token, which is no text unless it was asked for."""
    return (
        request.finish_reason is FinishReason.STOP
        and not isinstance(request.stop_reason, str)
        and not request.params.include_stop_str_in_output
        # Where a grammar has come to its end, the last token is text.
        and request.output_token_ids[-1] in request.end_token_ids
    )


def _repeats_itself(request: Request) -> bool:
    detection, output = request.params.repetition_detection, request.output_token_ids
    if detection is None or len(output) < request.params.min_tokens:
        return False
    return detection.finds(output)


def _note_cached_tokens(sample: _Sample) -> None:
    if sample.parent.num_cached_tokens < 0:
        sample.parent.num_cached_tokens = max(0, sample.request.num_cached_tokens)


def _take_positions(sample: _Sample) -> tuple[PositionLogprobs, ...] | None:
    if not sample.positions:
        return None
    positions, sample.positions = tuple(sample.positions), []
    return positions
