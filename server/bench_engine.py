"""Runs requests through an engine in this process and keeps their timelines."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paged.scheduler.params import SamplingParams
from paged.server.bench_timeline import Timeline

if TYPE_CHECKING:
    from paged.scheduler.engine import Engine


def usable_token_ids(engine: "Engine", vocab_size: int) -> list[int]:
    """Return the ids that a random prompt may hold: those that have a text and are not special."""
    tokenizer = engine.tokenizer
    known = min(vocab_size, tokenizer.vocab_size)
    return [i for i in range(known) if i not in tokenizer.special_ids]


def run_requests(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    output_lens: Sequence[int],
    *,
    on_finished: Callable[[], object] = lambda: None,
) -> tuple[list[Timeline], int]:
    """Generate for all prompts at once, greedily and past the end of a text.

    What earlier requests left in the prefix cache is forgotten first.

    Args:
      engine: with nothing to do.
      prompts: token ids.
      output_lens: tokens to generate, one number per prompt.
      on_finished: called when a request has ended.

    Returns: a timeline per prompt, and the prompt tokens taken from the prefix cache.
    Raises: ParameterError for a prompt that cannot be served.
    """
    engine.reset_prefix_cache()
    timelines = {}
    num_cached_tokens = 0
    start = time.perf_counter()
    for index, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(str(index), prompt, params)
        timelines[str(index)] = Timeline(num_prompt_tokens=len(prompt), sent=start)
    while engine.has_unfinished:
        outputs, _ = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timeline = timelines[output.request_id]
            timeline.num_output_tokens += len(output.outputs[0].token_ids)
            timeline.arrivals.append(now)
            if output.finished:
                timeline.finished = True
                num_cached_tokens += output.num_cached_tokens
                on_finished()
    return list(timelines.values()), num_cached_tokens
