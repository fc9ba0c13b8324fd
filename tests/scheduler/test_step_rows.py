"""Columns read as rows."""

import itertools

import pytest

from paged.scheduler.output import FinishReason, ScheduledRequest
from paged.scheduler.step_rows import StepRows
from tests.scheduler.stepping import deliver, make_request, make_scheduler

A, B, C = (make_request(name, 20) for name in "abc")
ROWS = [
    ScheduledRequest(A, 19, 1, True, input_in_flight=True),
    ScheduledRequest(B, 0, 7, False),
    ScheduledRequest(C, 4, 16, True),
]


def test_columns_are_the_rows_they_were_made_of():
    columns = StepRows.of(ROWS)
    assert list(columns) == ROWS
    assert len(columns) == 3
    assert [columns[i] for i in range(-3, 3)] == ROWS + ROWS
    for start, stop in itertools.product(range(4), range(4)):
        assert columns[start:stop] == ROWS[start:stop]
    with pytest.raises(IndexError):
        columns[3]
    assert columns.requests == [A, B, C]
    assert (columns.starts, columns.counts) == ([19, 0, 4], [1, 7, 16])
    assert StepRows.of(columns) is columns


def test_columns_grow_and_shrink_like_a_list():
    columns, rows = StepRows.of(ROWS[:2]), ROWS[:2]
    columns.extend(StepRows.of(ROWS[2:]))
    assert list(columns) == ROWS
    assert columns.pop(1) == rows.pop(1)
    assert list(columns) == [ROWS[0], ROWS[2]]


def test_updates_say_who_began_and_who_ended():
    now = iter([float(second) for second in range(100)])
    scheduler = make_scheduler(clock=lambda: next(now))
    requests = [make_request("a", 4, max_tokens=1), make_request("b", 5000), make_request("c", 3)]
    for request in requests:
        request.arrival_time = 0.0
        scheduler.add(request)
    a, b, c = requests
    output = scheduler.schedule()  # of b only a part
    first = deliver(scheduler, output)
    assert [(u.request, u.row) for u in first] == [(a, 0)]
    assert first[0].is_first_token
    assert first[0].finish_reason is FinishReason.LENGTH
    updates = deliver(scheduler, scheduler.schedule())
    while not any(update.request is c for update in updates):
        updates = deliver(scheduler, scheduler.schedule())
    (started,) = [update for update in updates if update.request is c]
    assert started.is_first_token
    assert started.finish_reason is None
    assert updates[-1] == list(updates)[-1]
    assert updates[:1] == [updates[0]]
    with pytest.raises(IndexError):
        updates[len(updates)]
    assert b.output_token_ids
