"""Requests and schedulers of the tests, and steps with a scripted token instead of a device."""

from collections.abc import Sequence

import numpy as np

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.output import ModelRunnerOutput, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.step_rows import RequestUpdate

BLOCK_SIZE = 16
TOKEN = 7


def make_request(request_id, num_tokens, max_tokens=50, **settings) -> Request:
    # Every request has tokens of its own, so that nothing is shared by accident.
    first = 1000 * sum(request_id.encode())
    prompt = tuple(range(first, first + num_tokens))
    return Request(request_id, prompt, SamplingParams(), max_tokens, **settings)


def make_scheduler(*, num_blocks=1001, **settings) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    return Scheduler(pool=BlockPool(num_blocks, BLOCK_SIZE), **limits | settings)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def deliver(scheduler: Scheduler, output: SchedulerOutput, token=TOKEN) -> Sequence[RequestUpdate]:
    tokens = np.full(len(output.scheduled), token, np.int32)
    return scheduler.update(output, ModelRunnerOutput(tokens))


def counts(output: SchedulerOutput) -> dict[str, int]:
    assert output.num_tokens == sum(row.num_tokens for row in output.scheduled)
    return {row.request.request_id: row.num_tokens for row in output.scheduled}


def step(scheduler: Scheduler, token=TOKEN) -> dict[str, int]:
    output = scheduler.schedule()
    deliver(scheduler, output, token)
    return counts(output)


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def preempting_scheduler() -> tuple[Scheduler, list[Request]]:
    """Three requests that fill all six blocks; the first needs another one in the third step."""
    scheduler = make_scheduler(num_blocks=7, max_model_len=96)
    requests = [make_request(i, n) for i, n in zip("abc", (31, 20, 31), strict=True)]
    add(scheduler, *requests)
    step(scheduler)
    step(scheduler)
    return scheduler, requests
