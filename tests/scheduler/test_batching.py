"""`build_batch` against literals worked out by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.models.packing import NO_ROW, SAMPLING_COLUMNS, BatchLayout, sampling_row
from paged.scheduler.batching import Batch, build_batch
from paged.scheduler.logit_edits import LogitEdits, make_logit_edits
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.row_table import RowTable
from paged.scheduler.wide_edits import WideRowEdits, fill_wide_edits

LAYOUT = BatchLayout(
    num_tokens=8, num_seqs=4, max_blocks_per_seq=3, max_logit_edits=2, vocab_size=500
)
NUM_ROWS, BLOCK_SIZE = 6, 4
VERSIONS = itertools.count(1)


def make_request(prompt, output=(), block_ids=(), row=0, **fields) -> Request:
    request = Request("r", tuple(prompt), fields.pop("params", SamplingParams()), 16, **fields)
    request.output_token_ids = list(output)
    request.block_tables[0] = list(block_ids)
    request.batch_row = row
    request.table_version = next(VERSIONS)
    return request


def make_table(num_groups=1) -> RowTable:
    return RowTable(NUM_ROWS, LAYOUT.max_blocks_per_seq, num_groups)


def build(*scheduled: ScheduledRequest, table=None, layout=LAYOUT) -> dict[str, np.ndarray]:
    output = SchedulerOutput(scheduled, sum(s.num_tokens for s in scheduled))
    table = table or make_table(layout.num_groups)
    return layout.views(build_batch(output, layout, table, BLOCK_SIZE).packed)


def test_a_decode_and_a_prompt_chunk_share_the_token_axis():
    decode = make_request([1, 2, 3, 4], output=[5, 6], block_ids=[9, 4])
    chunk = make_request(range(100, 110), block_ids=[7, 2], row=3)
    views = build(
        ScheduledRequest(decode, start=5, num_tokens=1, samples=True),
        ScheduledRequest(chunk, start=3, num_tokens=4, samples=False),
    )
    assert views["token_ids"].tolist() == [6, 103, 104, 105, 106, 0, 0, 0]
    assert views["positions"].tolist() == [5, 3, 4, 5, 6, 0, 0, 0]
    # Position 5 of the decode is offset 1 of block 4; positions 3..6 are 7:3, 2:0, 2:1, 2:2.
    assert views["slot_mapping"].tolist() == [17, 31, 8, 9, 10, 0, 0, 0]
    assert views["seq_lens"].tolist() == [6, 7, 0, 0]
    assert views["query_start_loc"].tolist() == [0, 1, 5, 5, 5]
    assert views["logits_indices"].tolist() == [0, 4, 0, 0]
    assert views["block_tables"].tolist() == [[9, 4, 0], [7, 2, 0], [0, 0, 0], [0, 0, 0]]


def test_a_chunk_may_span_prompt_and_recomputed_output():
    resumed = make_request([1, 2, 3], output=[4, 5], block_ids=[3, 6])
    views = build(ScheduledRequest(resumed, start=0, num_tokens=5, samples=True))
    assert views["token_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


def test_only_rows_that_sample_carry_sampling_parameters():
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, logprobs=2)
    row = sampling_row(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=3, num_prompt_tokens=1)
    sampling = make_request([1], block_ids=[1], params=params, seed=3)
    prefill = make_request([1, 2], block_ids=[2], row=1, params=params, seed=4)
    views = build(
        ScheduledRequest(sampling, 0, 1, samples=True), ScheduledRequest(prefill, 0, 1, False)
    )
    assert views["sampling"][0].tolist() == row.tolist()
    assert views["sampling"][1].tolist() == sampling_row().tolist()
    assert views["wants_logprobs"].tolist() == [1]
    assert views["sampling"].shape == (4, len(SAMPLING_COLUMNS))
    assert views["sampled_rows"].tolist() == [0, NO_ROW, NO_ROW, NO_ROW]


def test_logprobs_are_not_asked_for_by_unfinished_prefills():
    prefill = make_request([1, 2], block_ids=[2], params=SamplingParams(logprobs=2))
    views = build(ScheduledRequest(prefill, 0, 1, samples=False))
    assert views["wants_logprobs"].tolist() == [0]


def test_edits_of_this_step_are_written_and_the_rest_is_unused():
    edits = LogitEdits(fixed=((7, 2.5),), held_back=(8,), min_tokens=2)
    request = make_request([1], output=[4], block_ids=[1], logit_edits=edits)
    views = build(ScheduledRequest(request, 1, 1, samples=True))
    assert views["edit_ids"][0].tolist() == [7, 8]
    assert views["edit_values"].view(np.float32)[0].tolist() == [2.5, -np.inf]
    request.output_token_ids.append(5)
    views = build(ScheduledRequest(request, 2, 1, samples=True))
    assert views["edit_ids"][0].tolist() == [7, LAYOUT.vocab_size]


def test_many_edits_come_beside_the_packed_array_while_there_are_some():
    params = SamplingParams(temperature=0, min_tokens=2)
    edits = make_logit_edits(params, vocab_size=500, stop_ids=range(70), bad_words=[])
    request = make_request([1], output=[4], block_ids=[1], params=params, logit_edits=edits)
    plain = make_request([1], output=[4], block_ids=[2], row=1, params=SamplingParams())

    def batch(start: int, *others: Request) -> Batch:
        rows = [ScheduledRequest(r, start, 1, samples=True) for r in (*others, request)]
        return build_batch(SchedulerOutput(tuple(rows), len(rows)), LAYOUT, make_table(), 4)

    first = batch(1, plain)
    assert not first.is_greedy
    ((row, fixed, forbidden),) = first.wide_edits
    assert (row, fixed.allowed, forbidden) == (1, None, list(range(70)))
    views = LAYOUT.views(first.packed)
    assert views["uses_wide_edits"].tolist() == [1]
    assert views["num_wide_biases"].tolist() == [0]
    assert (views["edit_ids"] == LAYOUT.vocab_size).all()
    request.output_token_ids.append(5)
    second = batch(2)
    assert second.is_greedy
    assert not second.wide_edits
    assert LAYOUT.views(second.packed)["uses_wide_edits"].tolist() == [0]


def test_rows_of_many_edits_are_written_where_they_belong():
    params = SamplingParams(
        logit_bias={i: float(i) for i in range(100)}, allowed_token_ids=range(0, 500, 2)
    )
    fixed = make_logit_edits(params, vocab_size=500, stop_ids=(), bad_words=[]).wide
    rows = [WideRowEdits(1, fixed, [4, 30, 499]), WideRowEdits(3, fixed, [])]
    edits = fill_wide_edits(rows, LAYOUT)
    allowed = np.unpackbits(edits.allowed.view(np.uint8), axis=1, bitorder="little")[:, :500]
    even = [i % 2 == 0 for i in range(500)]
    assert allowed[0].all()
    assert allowed[2].all()
    assert allowed[3].tolist() == even
    assert allowed[1].tolist() == [is_even and i not in (4, 30) for i, is_even in enumerate(even)]
    for row in range(4):
        used = edits.bias_ids[row] < LAYOUT.vocab_size
        assert used.sum() == (100 if row % 2 else 0)
        assert (edits.bias_values[row][used] == edits.bias_ids[row][used]).all()


def test_outputs_in_flight_count_towards_min_tokens():
    edits = LogitEdits(held_back=(8,), min_tokens=3)
    request = make_request([1], output=[4], block_ids=[1], logit_edits=edits)
    # Position 2 is the second output, in flight; the third is sampled now, the fourth next.
    views = build(ScheduledRequest(request, 2, 1, samples=True, input_in_flight=True))
    assert views["edit_ids"][0].tolist() == [8, LAYOUT.vocab_size]
    request.output_token_ids.append(5)
    views = build(ScheduledRequest(request, 3, 1, samples=True, input_in_flight=True))
    assert views["edit_ids"][0].tolist() == [LAYOUT.vocab_size, LAYOUT.vocab_size]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_a_batch_is_greedy_unless_a_row_that_samples_asks_for_more(fields):
    def is_greedy(samples: bool) -> bool:
        plain = make_request([1], block_ids=[1], params=SamplingParams(temperature=0, top_p=0.5))
        params = SamplingParams(**({"temperature": 0} | fields))
        other = make_request([1, 2], block_ids=[2], row=1, params=params)
        steps = ScheduledRequest(plain, 0, 1, True), ScheduledRequest(other, 0, 1, samples)
        return build_batch(SchedulerOutput(steps, 2), LAYOUT, make_table(), BLOCK_SIZE).is_greedy

    assert is_greedy(samples=False)
    assert not is_greedy(samples=True)


def test_a_batch_is_greedy_again_when_its_edits_are_over():
    edits = LogitEdits(held_back=(8,), min_tokens=1)
    params = SamplingParams(temperature=0)
    held = make_request([1], block_ids=[1], params=params, logit_edits=edits)
    # An allow-list of nothing but forbidden tokens still forbids the rest.
    allowed = make_request(
        [1], block_ids=[1], params=params, logit_edits=LogitEdits(only_edits=True)
    )

    def is_greedy(request: Request, start: int) -> bool:
        output = SchedulerOutput((ScheduledRequest(request, start, 1, True),), 1)
        return build_batch(output, LAYOUT, make_table(), BLOCK_SIZE).is_greedy

    assert not is_greedy(held, 0)
    held.output_token_ids.append(5)
    assert is_greedy(held, 1)
    assert not is_greedy(allowed, 0)


def test_an_input_in_flight_is_named_by_its_batch_row():
    decode = make_request([1, 2], block_ids=[9], row=5)
    chunk = make_request([1, 2], output=[3], block_ids=[8], row=2)
    known = make_request([6], output=[7], block_ids=[3], row=0)
    views = build(
        ScheduledRequest(decode, start=2, num_tokens=1, samples=True, input_in_flight=True),
        ScheduledRequest(known, start=1, num_tokens=1, samples=True),
        ScheduledRequest(chunk, start=1, num_tokens=3, samples=True, input_in_flight=True),
    )
    assert views["token_ids"].tolist() == [-6, 7, 2, 3, -3, 0, 0, 0]
    assert views["positions"].tolist() == [2, 1, 1, 2, 3, 0, 0, 0]
    assert views["sampled_rows"].tolist() == [5, 0, 2, NO_ROW]


def test_a_prompt_of_one_token_and_its_single_token_chunks_are_read_from_the_prompt():
    request = make_request([11, 12, 13], output=[14], block_ids=[1])
    for start, token_id in enumerate([11, 12, 13, 14]):
        views = build(ScheduledRequest(request, start, 1, samples=False))
        assert views["token_ids"][0] == token_id


def test_a_table_that_has_grown_is_followed():
    table = make_table()
    request = make_request([1] * 4, output=[5], block_ids=[7, 2])
    build(ScheduledRequest(request, 4, 1, samples=True), table=table)
    request.output_token_ids += [6, 7, 8, 9]
    request.block_ids.append(3)
    views = build(ScheduledRequest(request, 8, 1, samples=True), table=table)
    assert views["block_tables"][0].tolist() == [7, 2, 3]
    assert views["slot_mapping"][0] == 3 * BLOCK_SIZE


def test_a_table_whose_version_changed_is_read_anew():
    table = make_table()
    request = make_request([1] * 6, block_ids=[7, 2])
    build(ScheduledRequest(request, 5, 1, samples=True), table=table)
    request.block_ids[1] = 4
    request.table_version = next(VERSIONS)
    views = build(ScheduledRequest(request, 5, 1, samples=True), table=table)
    assert views["slot_mapping"][0] == 4 * BLOCK_SIZE + 1
    assert views["block_tables"][0, :2].tolist() == [7, 4]


def test_a_row_goes_over_to_the_next_request_with_all_its_settings():
    table = make_table()
    edits = LogitEdits(fixed=((7, 2.5),))
    params = SamplingParams(temperature=0.5, logprobs=1)
    first = make_request([1], block_ids=[5], row=2, params=params, logit_edits=edits)
    build(ScheduledRequest(first, 0, 1, samples=True), table=table)
    second = make_request([2], block_ids=[6], row=2, params=SamplingParams(temperature=0))
    views = build(ScheduledRequest(second, 0, 1, samples=True), table=table)
    assert views["block_tables"][0, 0] == 6
    assert views["sampling"][0].tolist() == sampling_row(num_prompt_tokens=1).tolist()
    assert views["wants_logprobs"].tolist() == [0]
    assert (views["edit_ids"] == LAYOUT.vocab_size).all()


def test_each_cache_group_has_a_table_and_slots_of_its_own():
    layout = dataclasses.replace(LAYOUT, num_groups=2)
    decode = make_request([1] * 4, output=[5, 6], block_ids=[9, 4])
    decode.block_tables.append([0, 3])  # block 0 has left the window
    chunk = make_request(range(100, 110), block_ids=[7, 2], row=1)
    chunk.block_tables.append([8, 1])
    views = build(
        ScheduledRequest(decode, start=5, num_tokens=1, samples=True),
        ScheduledRequest(chunk, start=3, num_tokens=3, samples=False),
        layout=layout,
    )
    assert views["slot_mapping"].tolist() == [17, 31, 8, 9, 0, 0, 0, 0]
    assert views["slot_mapping.1"].tolist() == [13, 35, 4, 5, 0, 0, 0, 0]
    assert views["block_tables"][:2, :2].tolist() == [[9, 4], [7, 2]]
    assert views["block_tables.1"][:2, :2].tolist() == [[0, 3], [8, 1]]


@st.composite
def runs(draw):
    """Requests that come, grow and go on a few rows: (row, is new, tokens to compute) by step."""
    step = st.lists(
        st.tuples(st.integers(0, NUM_ROWS - 1), st.booleans(), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=LAYOUT.num_seqs,
        unique_by=lambda sequence: sequence[0],
    )
    return draw(st.lists(step, min_size=1, max_size=12))


@given(runs())
def test_any_sequence_of_steps_equals_batches_built_token_by_token(run):
    table, by_row, block_ids = make_table(), {}, itertools.count(1)
    layout = dataclasses.replace(LAYOUT, num_tokens=16, max_blocks_per_seq=16)
    table = RowTable(NUM_ROWS, layout.max_blocks_per_seq)
    for step in run:
        scheduled = []
        for row, is_new, num_tokens, in_flight in step:
            request = by_row.get(row)
            if request is None or is_new:
                request = by_row[row] = make_request([row], row=row, seed=next(block_ids))
            start = request.num_computed_tokens
            stop = start + num_tokens
            request.num_computed_tokens = stop
            missing = stop - int(in_flight) - request.num_tokens
            request.output_token_ids += [next(block_ids) for _ in range(missing)]
            while len(request.block_ids) * BLOCK_SIZE < stop:
                request.block_ids.append(next(block_ids))
            in_flight = in_flight and stop > request.num_tokens
            scheduled.append(ScheduledRequest(request, start, num_tokens, True, in_flight))
        views = build(*scheduled, table=table, layout=layout)
        token = 0
        for i, (request, start, num_tokens, _, in_flight) in enumerate(scheduled):
            for position in range(start, start + num_tokens):
                is_last = position == start + num_tokens - 1
                known = -1 - request.batch_row
                if not (is_last and in_flight):
                    known = request.tokens(position, position + 1)[0]
                assert views["token_ids"][token] == known
                assert views["positions"][token] == position
                block = request.block_ids[position // BLOCK_SIZE]
                assert views["block_tables"][i, position // BLOCK_SIZE] == block
                assert views["slot_mapping"][token] == block * BLOCK_SIZE + position % BLOCK_SIZE
                token += 1
            assert views["seq_lens"][i] == start + num_tokens
            assert views["logits_indices"][i] == token - 1
            assert views["query_start_loc"][i + 1] == token
            num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
            assert views["block_tables"][i, :num_blocks].tolist() == request.block_ids[:num_blocks]
            assert views["sampling"][i].tolist() == request.sampling_row.tolist()
        assert (views["query_start_loc"][len(scheduled) :] == token).all()
        assert not views["seq_lens"][len(scheduled) :].any()
        assert not views["slot_mapping"][token:].any()


def test_a_buffer_handed_to_the_device_is_never_reused():
    request = make_request([1, 2], block_ids=[1])
    step = SchedulerOutput((ScheduledRequest(request, 0, 2, True),), 2)
    table = make_table()
    first = build_batch(step, LAYOUT, table, BLOCK_SIZE).packed
    second = build_batch(step, LAYOUT, table, BLOCK_SIZE).packed
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, table.block_tables)
