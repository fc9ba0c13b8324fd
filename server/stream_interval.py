"""`in_intervals`: several tokens per chunk instead of one, for clients that need not see each."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from paged.scheduler.deltas import join_deltas
from paged.scheduler.output import CompletionOutput, RequestOutput


async def in_intervals(
    outputs: AsyncGenerator[RequestOutput], interval: int
) -> AsyncGenerator[RequestOutput]:
    """Yield the deltas of one prompt, at least `interval` tokens at a time.

    The first token of each sample comes at once, and so does its end. Closing the generator closes
    `outputs`.

    Source: vLLM `v1/engine/output_processor.py`.
    """
    held: dict[int, list[CompletionOutput]] = {}
    started: set[int] = set()
    async with aclosing(outputs):
        async for output in outputs:
            ready = []
            for delta in output.outputs:
                deltas = held.setdefault(delta.index, [])
                deltas.append(delta)
                num_tokens = sum(len(one.token_ids) for one in deltas)
                if delta.index not in started or delta.finish_reason or num_tokens >= interval:
                    started.add(delta.index)
                    ready.append(join_deltas(held.pop(delta.index)))
            if ready:
                yield dataclasses.replace(output, outputs=tuple(ready))
