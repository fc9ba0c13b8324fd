"""`build_batch` against literals worked out by hand."""

import numpy as np

from paged.models.packing import SAMPLING_COLUMNS, BatchLayout, sampling_row
from paged.scheduler.batching import build_batch
from paged.scheduler.logit_edits import LogitEdits
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request

LAYOUT = BatchLayout(
    num_tokens=8, num_seqs=4, max_blocks_per_seq=3, max_logit_edits=2, vocab_size=500
)


def make_request(prompt, output=(), block_ids=(), **fields) -> Request:
    request = Request("r", tuple(prompt), fields.pop("params", SamplingParams()), 16, **fields)
    request.output_token_ids = list(output)
    request.block_tables[0] = list(block_ids)
    return request


def build(*scheduled: ScheduledRequest) -> dict[str, np.ndarray]:
    output = SchedulerOutput(scheduled, sum(s.num_tokens for s in scheduled))
    return LAYOUT.views(build_batch(output, LAYOUT, block_size=4))


def test_a_decode_and_a_prompt_chunk_share_the_token_axis():
    decode = make_request([1, 2, 3, 4], output=[5, 6], block_ids=[9, 4])
    chunk = make_request(range(100, 110), block_ids=[7, 2])
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
    prefill = make_request([1, 2], block_ids=[2], params=params, seed=4)
    views = build(
        ScheduledRequest(sampling, 0, 1, samples=True), ScheduledRequest(prefill, 0, 1, False)
    )
    assert views["sampling"][0].tolist() == row.tolist()
    assert views["sampling"][1].tolist() == sampling_row().tolist()
    assert views["wants_logprobs"].tolist() == [1]
    assert views["sampling"].shape == (4, len(SAMPLING_COLUMNS))


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


def test_a_buffer_handed_to_the_device_is_never_reused():
    request = make_request([1, 2], block_ids=[1])
    step = SchedulerOutput((ScheduledRequest(request, 0, 2, True),), 2)
    first = build_batch(step, LAYOUT, 4)
    second = build_batch(step, LAYOUT, 4)
    assert not np.shares_memory(first, second)
