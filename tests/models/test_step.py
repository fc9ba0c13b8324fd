"""What follows the model: the programs that turn hidden rows into tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.kv_cache import KVCacheSpec, allocate_kv_cache
from paged.models.executables import ExecutableStore
from paged.models.layers import Embed
from paged.models.packing import BatchLayout, sampling_row
from paged.models.programs import ProgramSource
from paged.models.sampling import mask_words
from paged.models.sharded_programs import ShardedPrograms
from paged.models.step import compile_greedy, compile_resize, compile_sample
from paged.sharding import replicated, tensor_parallel_mesh

VOCAB_SIZE, HIDDEN_SIZE, NUM_ROWS = 150, 24, 5
LAYOUT = BatchLayout(
    num_tokens=8, num_seqs=8, max_blocks_per_seq=2, max_logit_edits=2, vocab_size=VOCAB_SIZE
)
CACHE = allocate_kv_cache(KVCacheSpec(1, 1, 8, 4, "float32"), 3)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def embed(request: pytest.FixtureRequest) -> Embed:
    embed = Embed(VOCAB_SIZE, HIDDEN_SIZE, dtype=request.param, rngs=nnx.Rngs(0))
    # Tokens 70 and 140 are the same vector, in other blocks than each other.
    weight = embed.weight[...].at[140].set(embed.weight[...][70])
    embed.weight.set_value(weight)
    return embed


def hidden_rows(embed: Embed) -> jax.Array:
    """Rows that point at token 70, at token 149, and anywhere."""
    rows = np.random.default_rng(1).standard_normal((LAYOUT.num_seqs, HIDDEN_SIZE))
    rows[0] = embed.weight[...][70] * 9
    rows[1] = embed.weight[...][149] * 9
    return jnp.asarray(rows, embed.weight.dtype)


def packed_rows(**fields: float) -> np.ndarray:
    """Sequences 0, 1 and 3 are kept in batch rows 4, 0 and 2."""
    packed = LAYOUT.empty()
    views = LAYOUT.views(packed)
    views["sampled_rows"][[0, 1, 3]] = [4, 0, 2]
    views["sampling"][:] = sampling_row(**fields)
    return packed[: LAYOUT.rows_size]


def test_both_programs_take_the_first_best_token_and_keep_it_by_batch_row(embed: Embed) -> None:
    head, head_params = nnx.split(embed)
    hidden, last_tokens = hidden_rows(embed), jnp.full(NUM_ROWS, -7, jnp.int32)
    weight = np.asarray(embed.weight[...], np.float64)
    logits = np.asarray(hidden, np.float64) @ weight.T
    expected = logits.argmax(axis=1)
    assert expected[:2].tolist() == [70, 149]  # not 140
    greedy = compile_greedy(ExecutableStore(None), head, head_params, LAYOUT, max_num_seqs=NUM_ROWS)
    token_ids, kept = greedy(head_params, hidden, packed_rows(), last_tokens)
    assert token_ids.tolist() == expected.tolist()
    assert kept.tolist() == [expected[1], -7, expected[3], -7, expected[0]]

    sample = compile_sample(
        ExecutableStore(None),
        head,
        head_params,
        CACHE,
        LAYOUT,
        max_num_seqs=NUM_ROWS,
        max_logprobs=2,
    )
    # A penalty of nothing, as no token is known yet: the long way to the same tokens.
    rows = packed_rows(repetition_penalty=1.5)
    masks = np.zeros((LAYOUT.num_seqs, mask_words(LAYOUT.vocab_size)), np.int32)
    wide = LAYOUT.empty_wide_edits()
    arguments = head_params, hidden, rows, CACHE.token_ids, last_tokens, masks, wide
    samples, kept_too = sample(*arguments)
    assert samples.token_ids.tolist() == expected.tolist()
    assert kept_too.tolist() == kept.tolist()


def test_the_greedy_program_does_not_know_the_sampler(embed: Embed) -> None:
    head, head_params = nnx.split(embed)
    greedy = compile_greedy(ExecutableStore(None), head, head_params, LAYOUT, max_num_seqs=NUM_ROWS)
    text = greedy.as_text()  # type: ignore[attr-defined]
    for word in ("sort", "rng", "exponential", "while"):
        assert word not in text, word


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_seqs", [3, 8, 11])
def test_rows_between_the_programs_are_cut_or_padded_to_another_number(
    embed: Embed, num_seqs: int, num_devices: int
) -> None:
    head, head_params = nnx.split(embed)
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 100, LAYOUT.size).astype(np.int32)
    hidden = hidden_rows(embed)
    store: ProgramSource = ExecutableStore(None)
    if num_devices > 1:
        mesh = tensor_parallel_mesh(num_devices)
        store = ShardedPrograms(mesh, store)
        hidden = jax.device_put(hidden, replicated(mesh))
    resize = compile_resize(store, head, head_params, LAYOUT, num_seqs=num_seqs)
    got_hidden, got_rows = resize(hidden, packed[: LAYOUT.rows_size])

    kept = min(num_seqs, LAYOUT.num_seqs)
    assert got_hidden.shape == (num_seqs, HIDDEN_SIZE)
    np.testing.assert_array_equal(got_hidden[:kept], hidden[:kept])
    other = dataclasses.replace(LAYOUT, num_seqs=num_seqs)
    # Field by field what the host would have written into the other layout.
    expected = other.empty()
    views = other.views(expected)
    for name, values in LAYOUT.views(packed).items():
        views[name][:kept] = values[:kept]
    np.testing.assert_array_equal(got_rows, expected[: other.rows_size])
