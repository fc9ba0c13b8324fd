"""The host writes and the compiled step reads the same fields."""

import dataclasses

import jax
import numpy as np
import pytest

from paged.models.packing import NO_ROW, SAMPLING_COLUMNS, BatchLayout, in_flight, sampling_row

LAYOUT = BatchLayout(
    num_tokens=8,
    num_seqs=3,
    max_blocks_per_seq=5,
    max_logit_edits=4,
    vocab_size=99,
    num_groups=2,
)


def test_fields_written_on_the_host_arrive_in_the_step():
    packed = LAYOUT.empty()
    views = LAYOUT.views(packed)
    expected = {}
    first = ("token_ids", "positions", "slot_mapping", "block_tables")
    for number, name in enumerate((*first, "slot_mapping.1", "block_tables.1")):
        values = np.arange(views[name].size, dtype=np.int32).reshape(views[name].shape)
        expected[name] = values + 1000 * (number + 1)
        views[name][:] = expected[name]
    second = ("seq_lens", "query_start_loc", "logits_indices", "sampled_rows")
    for number, name in enumerate(second):
        expected[name] = np.arange(views[name].size, dtype=np.int32) + 50 * (number + 1)
        views[name][:] = expected[name]

    forward = jax.jit(LAYOUT.unpack_forward)(packed)
    rows = packed[: LAYOUT.rows_size]
    _, tables, lengths = jax.jit(LAYOUT.unpack_sampling)(rows)
    sampled_rows = jax.jit(LAYOUT.unpack_sampled_rows)(rows)

    np.testing.assert_array_equal(forward.token_ids, expected["token_ids"])
    np.testing.assert_array_equal(forward.positions, expected["positions"])
    np.testing.assert_array_equal(forward.logits_indices, expected["logits_indices"])
    for name in ("slot_mapping", "block_tables", "seq_lens", "query_start_loc"):
        np.testing.assert_array_equal(getattr(forward.attention[0], name), expected[name])
    for name in ("slot_mapping", "block_tables"):
        np.testing.assert_array_equal(getattr(forward.attention[1], name), expected[f"{name}.1"])
    for name in ("seq_lens", "query_start_loc"):
        np.testing.assert_array_equal(getattr(forward.attention[1], name), expected[name])
    np.testing.assert_array_equal(tables, expected["block_tables"])
    np.testing.assert_array_equal(lengths, expected["seq_lens"])
    np.testing.assert_array_equal(sampled_rows, expected["sampled_rows"])


def test_what_the_sampler_reads_has_one_shape_for_all_buckets_of_as_many_sequences():
    longer = dataclasses.replace(LAYOUT, num_tokens=64)
    assert longer.rows_size == LAYOUT.rows_size
    assert longer.size > LAYOUT.size


def test_sampling_parameters_survive_the_trip_bit_by_bit():
    packed = LAYOUT.empty()
    views = LAYOUT.views(packed)
    views["sampling"][1] = sampling_row(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        top_k=40,
        seed=0xDEADBEEF_00C0FFEE,
        num_prompt_tokens=17,
        only_edits=True,
    )
    views["edit_ids"][1, 0] = 7
    views["edit_values"][1, 0] = np.array([-np.inf], np.float32).view(np.int32)[0]

    sampling, *_ = jax.jit(LAYOUT.unpack_sampling)(packed[: LAYOUT.rows_size])

    for name, value in (
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("min_p", 0.05),
        ("presence_penalty", -1.5),
        ("frequency_penalty", 0.25),
        ("repetition_penalty", 1.1),
    ):
        assert getattr(sampling, name)[1] == np.float32(value)
    assert sampling.top_k[1] == 40
    assert sampling.num_prompt_tokens[1] == 17
    assert sampling.only_edits.tolist() == [0, 1, 0]
    assert [hex(word) for word in sampling.seeds[1].tolist()] == ["0xdeadbeef", "0xc0ffee"]
    assert sampling.edit_ids[1].tolist() == [7, 99, 99, 99]
    assert sampling.edit_values[1, 0] == -np.inf


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 + 5])
def test_seed_is_taken_modulo_64_bits(seed):
    row = sampling_row(seed=seed)
    high, low = (
        int(np.uint32(row.view(np.uint32)[SAMPLING_COLUMNS.index(name)]))
        for name in ("seed_high", "seed_low")
    )
    assert high << 32 | low == seed % 2**64


def test_padding_is_greedy_and_edits_nothing():
    rows = jax.numpy.asarray(LAYOUT.empty()[: LAYOUT.rows_size])
    sampling, _, _ = LAYOUT.unpack_sampling(rows)
    assert (LAYOUT.unpack_sampled_rows(rows) == NO_ROW).all()
    assert not sampling.temperature.any()
    assert (sampling.top_p == 1).all()
    assert (sampling.repetition_penalty == 1).all()
    assert (sampling.edit_ids == LAYOUT.vocab_size).all()
    assert not sampling.wants_logprobs.any()


def test_ids_in_flight_are_negative_and_name_their_row():
    ids = [in_flight(row) for row in range(3)]
    assert ids == [-1, -2, -3]
    assert [in_flight(token_id) for token_id in ids] == [0, 1, 2]


def test_views_of_one_field_and_of_all_are_the_same_memory():
    packed = LAYOUT.empty()
    LAYOUT.view(packed, "positions")[:] = 7
    assert (LAYOUT.views(packed)["positions"] == 7).all()
    assert packed.size == LAYOUT.size == sum(v.size for v in LAYOUT.views(packed).values())
