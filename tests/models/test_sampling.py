"""Sampling against NumPy references that sort, and the promises about seeds and batch mates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.batch import SampledTokens, SamplingBatch, WideEdits
from paged.models.packing import NO_TOKEN
from paged.models.sampling import mask_words, sample

MAX_EDITS = 4
MAX_BIASES = 256
OF_THE_BATCH = ("wants_logprobs", "uses_masks", "uses_wide_edits", "num_wide_biases")
UNUSED = 2**30  # an edit id past every vocabulary


def make_batch(num_seqs: int, **fields: object) -> SamplingBatch:
    """A neutral greedy batch with the given fields; scalars hold for every row."""
    neutral = {
        "temperature": (np.float32, 0.0),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1.0),
        "min_p": (np.float32, 0.0),
        "presence_penalty": (np.float32, 0.0),
        "frequency_penalty": (np.float32, 0.0),
        "repetition_penalty": (np.float32, 1.0),
        "num_prompt_tokens": (np.int32, 0),
        "only_edits": (np.int32, 0),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(fields.pop(name, value), dtype), num_seqs)
        for name, (dtype, value) in neutral.items()
    }
    seeds = np.stack([np.full(num_seqs, 7), np.arange(num_seqs)], axis=1)
    arrays["seeds"] = np.asarray(fields.pop("seeds", seeds), np.uint32)
    arrays["edit_ids"] = np.full((num_seqs, MAX_EDITS), UNUSED, np.int32)
    arrays["edit_values"] = np.zeros((num_seqs, MAX_EDITS), np.float32)
    for row, edits in fields.pop("edits", {}).items():
        for column, (token, value) in enumerate(edits):
            arrays["edit_ids"][row, column] = token
            arrays["edit_values"][row, column] = value
    arrays["wants_logprobs"] = np.array([fields.pop("wants_logprobs", 0)], np.int32)
    for name in OF_THE_BATCH[1:]:
        arrays[name] = np.array([fields.pop(name, 0)], np.int32)
    assert not fields, fields
    return SamplingBatch(**{name: jnp.asarray(array) for name, array in arrays.items()})


@functools.partial(jax.jit, static_argnames="max_logprobs")
def jitted(logits, batch, history, positions, masks, wide, max_logprobs) -> SampledTokens:
    return sample(
        lambda: logits, batch, lambda: history, positions, masks, wide, max_logprobs=max_logprobs
    )


def wide_edits(
    num_seqs: int,
    vocab_size: int,
    *,
    allowed: dict[int, np.ndarray] | None = None,
    biases: dict[int, dict[int, float]] | None = None,
) -> WideEdits:
    """Bool `[vocab_size]` and biases by row, as the arrays that the sampler reads."""
    may = np.ones((num_seqs, vocab_size), np.bool_)
    ids = np.full((num_seqs, MAX_BIASES), NO_TOKEN, np.int32)
    values = np.zeros((num_seqs, MAX_BIASES), np.float32)
    for row, row_allowed in (allowed or {}).items():
        may[row] = row_allowed
    for row, bias in (biases or {}).items():
        ids[row, : len(bias)] = list(bias)
        values[row, : len(bias)] = list(bias.values())
    return WideEdits(pack(may), ids, values)


def run(
    logits: np.ndarray,
    batch: SamplingBatch,
    *,
    history: np.ndarray | None = None,
    positions: object = 0,
    masks: np.ndarray | None = None,
    wide: WideEdits | None = None,
    max_logprobs: int = 0,
) -> SampledTokens:
    """The samples of a batch, as NumPy arrays."""
    num_seqs = logits.shape[0]
    history = np.zeros((num_seqs, 1), np.int32) if history is None else history
    positions = np.broadcast_to(np.asarray(positions, np.int32), num_seqs)
    if masks is None:
        masks = np.zeros((num_seqs, mask_words(logits.shape[1])), np.int32)
    if wide is None:
        nothing = dict.fromkeys(range(num_seqs), np.zeros(logits.shape[1], np.bool_))
        wide = wide_edits(*logits.shape, allowed=nothing)  # it must not be read
    # Few shapes, as each is seconds of compilation: further rows are like the last, and what is
    # behind the known tokens may be anything.
    more_rows = -num_seqs % 8

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, more_rows)] + [(0, 0)] * (array.ndim - 1), mode="edge")

    history = np.pad(history, ((0, 0), (0, max(0, 24 - history.shape[1]))))
    arguments = logits.astype(np.float32), batch, history, positions, masks, wide
    logits, rows, *others = jax.tree.map(padded, arguments)
    rows = dataclasses.replace(rows, **{name: getattr(batch, name) for name in OF_THE_BATCH})
    result = jitted(logits, rows, *others, max_logprobs)
    return jax.tree.map(lambda array: np.asarray(array)[:num_seqs], result)


def draw(row: np.ndarray, count: int, **fields: object) -> np.ndarray:
    """`count` draws from one row of logits: 256 seeds at as many positions as it takes."""
    num_seqs = 256
    # One program for all the short vocabularies.
    row = np.pad(row, (0, max(0, 150 - row.size)), constant_values=-np.inf)
    logits = np.broadcast_to(row, (num_seqs, row.size))
    batch = make_batch(num_seqs, **({"temperature": 1.0} | fields))
    rounds = -(-count // num_seqs)
    return np.concatenate([run(logits, batch, positions=i).token_ids for i in range(rounds)])


def random_logits(num_seqs: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_seqs, vocab_size)) * 3).astype(np.float32)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def kept_tokens(row, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> set[int]:
    """What truncation leaves, by sorting; ties with the last one stay."""
    row = row.astype(np.float64) / temperature
    probabilities = softmax(row)
    kept = probabilities >= min_p * probabilities.max()
    if top_k:
        kept &= row >= np.sort(row)[::-1][min(top_k, row.size) - 1]
    if top_p < 1:
        left = np.where(kept, probabilities, 0) / probabilities[kept].sum()
        order = np.argsort(-left, kind="stable")
        last = int(np.searchsorted(np.cumsum(left[order]), top_p))
        kept &= left >= left[order[last]]
    return set(np.flatnonzero(kept).tolist())


# Greedy


@pytest.mark.parametrize("vocab_size", [1, 64, 65, 49152])
def test_greedy_takes_the_largest_logit(vocab_size: int):
    logits = random_logits(4, vocab_size)
    result = run(logits, make_batch(4))
    assert result.token_ids.dtype == np.int32
    np.testing.assert_array_equal(result.token_ids, logits.argmax(axis=1))


def test_greedy_takes_the_first_of_equal_logits():
    logits = np.zeros((4, 100), np.float32)
    logits[1, [70, 71, 99]] = 5.0
    logits[2] = -np.inf
    assert run(logits, make_batch(4)).token_ids.tolist() == [0, 70, 0, 0]


def test_greedy_rows_stay_greedy_beside_random_ones():
    logits = np.repeat(random_logits(1, 150), 256, axis=0)
    logits[:, [7, 140]] = logits.max() + 1.0  # ties, in different blocks
    temperature = np.tile([0.0, 2.0], 128)
    tokens = run(logits, make_batch(256, temperature=temperature, top_k=40)).token_ids
    assert set(tokens[::2].tolist()) == {7}
    assert len(set(tokens[1::2].tolist())) > 5


# Truncation


TIED = np.round(np.random.default_rng(1).uniform(0, 2, 100) * 4) / 4  # levels 0.25 apart


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 99},
        {"top_k": 1000},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.4, "top_k": 30, "top_p": 0.8},
        {"temperature": 0.5, "min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.4},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_draws_come_from_exactly_the_kept_tokens(kind: str, limits: dict[str, float]):
    # A narrow range of logits: whatever is kept has a probability of 0.1 % or more, so 16384
    # draws show all of it but with a chance of 1e-5.
    row = TIED if kind == "tied" else np.random.default_rng(2).uniform(0, 2, 100)
    kept = kept_tokens(row.astype(np.float32), **limits)
    assert set(draw(row, 16384, **limits).tolist()) == kept


def test_ties_with_the_kth_token_stay():
    row = np.array([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    assert set(draw(row, 1024, top_k=2).tolist()) == {0, 2, 3, 4}


def test_top_p_looks_at_what_top_k_left():
    # Of the two left, the better has 0.4 / 0.7 = 0.571; of all four it has only 0.4.
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(draw(row, 512, top_k=2, top_p=0.57).tolist()) == {0}
    assert set(draw(row, 512, top_p=0.57).tolist()) == {0, 1}


WIDE = 8192  # 128 blocks, so that not every token is a candidate of the short search


def plateau(num_high: int) -> np.ndarray:
    """Logits of which `num_high`, scattered, share most of the probability almost equally."""
    rng = np.random.default_rng(3)
    row = rng.uniform(-12, -10, WIDE)
    row[rng.permutation(WIDE)[:num_high]] = rng.permutation(num_high) * 1e-3 + 4
    return row.astype(np.float32)


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 5},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 200},
        {"top_p": 0.1},
        {"top_p": 0.8},
        {"min_p": 0.82},
        {"min_p": 0.97},
        {"top_k": 40, "top_p": 0.5},
        {"top_k": 150, "top_p": 0.2},
        {"min_p": 0.8, "top_k": 250, "top_p": 0.9},
    ],
    ids=str,
)
def test_wide_vocabulary_keeps_the_same_tokens_as_sorting(limits: dict[str, float]):
    # Both sides of what the candidate blocks can decide. 300 tokens: 20 draws of each or more.
    row = plateau(300)
    kept = kept_tokens(row, **limits)
    drawn = draw(row, 8192, **limits)
    assert set(drawn.tolist()) == kept


def test_rows_truncate_each_by_its_own_limits():
    row = plateau(300)
    top_k, top_p = np.array([0, 3, 200, 0, 0]), np.array([1.0, 1.0, 1.0, 0.02, 0.7])
    limits = {"top_k": np.resize(top_k, 256), "top_p": np.resize(top_p, 256)}
    drawn = draw(row, 1024, **limits).reshape(-1, 256)
    for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        assert set(drawn[:, i::5].flat) <= kept_tokens(row, top_k=k, top_p=p)


# The draw


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_probabilities(temperature: float):
    row = np.random.default_rng(4).uniform(0, 2.5, 150)  # three blocks
    drawn = draw(row, 51200, temperature=temperature)
    expected = softmax(row / temperature) * drawn.size
    observed = np.bincount(drawn, minlength=row.size)
    assert expected.min() > 5
    statistic = ((observed - expected) ** 2 / expected).sum()
    # Chi-square with 149 degrees of freedom: mean 149, standard deviation 17.3; six of them.
    assert statistic < 149 + 6 * 17.3


def test_low_temperature_is_nearly_greedy():
    row = random_logits(1, 150)[0]
    assert set(draw(row, 256, temperature=0.01).tolist()) == {int(row.argmax())}


def test_draw_depends_on_seed_and_position_alone():
    logits = random_logits(6, 3000, seed=5)
    fields = {
        "temperature": np.array([1.0, 0.8, 1.3, 0.0, 0.9, 1.1]),
        "top_k": np.array([0, 50, 0, 0, 500, 3]),
        "top_p": np.array([1.0, 0.9, 0.95, 1.0, 1.0, 1.0]),
        "seeds": np.stack([np.arange(6), np.arange(6) * 1000 + 3], axis=1),
    }
    positions = np.array([4, 9, 11, 2, 900, 5])
    together = run(logits, make_batch(6, **fields), positions=positions).token_ids
    order = np.array([5, 0, 3, 1, 4, 2])
    shuffled = {name: value[order] for name, value in fields.items()}
    result = run(logits[order], make_batch(6, **shuffled), positions=positions[order])
    np.testing.assert_array_equal(result.token_ids, together[order])
    for i in range(6):
        alone = {name: value[i : i + 1] for name, value in fields.items()}
        result = run(logits[i : i + 1], make_batch(1, **alone), positions=positions[i])
        assert result.token_ids[0] == together[i]


@pytest.mark.parametrize("change", ["high word", "low word", "position"])
def test_every_part_of_the_key_changes_the_draws(change: str):
    logits = np.zeros((64, 4096), np.float32)
    seeds = np.stack([np.full(64, 5), np.arange(64)], axis=1)
    other_seeds = seeds + np.array({"high word": [1, 0], "low word": [0, 64]}.get(change, [0, 0]))
    first = run(logits, make_batch(64, temperature=1.0, seeds=seeds), positions=10)
    other = run(
        logits,
        make_batch(64, temperature=1.0, seeds=other_seeds),
        positions=11 if change == "position" else 10,
    )
    assert (first.token_ids != other.token_ids).mean() > 0.95


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_possible_token_still_gives_a_token(temperature: float):
    logits = np.full((4, 100), -np.inf, np.float32)
    logits[1] = np.nan
    tokens = run(logits, make_batch(4, temperature=temperature)).token_ids
    assert ((tokens >= 0) & (tokens < 100)).all()


# Edits


def test_edits_add_to_the_logits_of_their_row():
    logits = np.zeros((4, 100), np.float32)
    logits[:, 9] = 1.0
    edits = {
        1: [(50, 2.0)],
        2: [(9, -np.inf), (8, 0.5)],
        3: [(60, 0.75), (60, 0.75)],  # a bias given twice adds up
    }
    assert run(logits, make_batch(4, edits=edits)).token_ids.tolist() == [9, 50, 8, 60]


def test_allow_list_forbids_everything_else():
    logits = np.zeros((4, 100), np.float32)
    logits[:, 9] = 50.0
    edits = {0: [(3, 0.0), (70, 0.0)], 1: [(3, 0.0), (70, 1.0)], 2: [(70, 1.0)]}
    batch = make_batch(4, edits=edits, only_edits=np.array([1, 1, 0, 1]))
    # The last list is empty: nothing is possible, and the first token stands for that.
    assert run(logits, batch).token_ids.tolist() == [3, 70, 9, 0]


def test_random_rows_never_draw_a_forbidden_token():
    logits = np.full((256, 150), -10.0)
    logits[:, :4] = [5.0, 4.0, 3.0, 2.0]
    banned = make_batch(256, temperature=1.0, edits={i: [(0, -np.inf)] for i in range(256)})
    drawn = set(run(logits, banned).token_ids.tolist())
    assert {1, 2, 3} <= drawn
    assert 0 not in drawn
    edits = {i: [(2, 0.0), (3, 0.0)] for i in range(256)}
    allowed = make_batch(256, temperature=1.0, edits=edits, only_edits=1, top_p=0.99, top_k=3)
    assert set(run(logits, allowed).token_ids.tolist()) == {2, 3}


# Penalties


def penalised(row, tokens, num_prompt, presence, frequency, repetition) -> np.ndarray:
    """One row after penalties, token by token."""
    row = row.astype(np.float32).copy()
    for token in set(tokens.tolist()):
        count = int((tokens[num_prompt:] == token).sum())
        factor = np.float32(repetition)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(frequency) * count + np.float32(presence) * (count > 0)
    return row


@pytest.mark.parametrize("length", [1, 40, 511, 512, 513, 1100])
def test_penalties_equal_the_reference(length: int):
    num_seqs, vocab_size, max_len = 32, 90, 1200
    rng = np.random.default_rng(length)
    logits = random_logits(num_seqs, vocab_size, seed=length) * 0.1
    positions = rng.integers(0, length + 1, num_seqs)
    num_prompt = rng.integers(0, positions + 1)
    # Past the known tokens lies whatever the blocks held before.
    history = rng.integers(0, vocab_size, (num_seqs, max_len)).astype(np.int32)
    strengths = {
        "presence_penalty": rng.uniform(-2, 2, num_seqs),
        "frequency_penalty": rng.uniform(-0.1, 0.1, num_seqs),
        "repetition_penalty": rng.uniform(0.5, 2, num_seqs),
    }
    for values in strengths.values():
        values[: num_seqs // 4] = 0.0
    strengths["repetition_penalty"][: num_seqs // 4] = 1.0
    batch = make_batch(num_seqs, num_prompt_tokens=num_prompt, **strengths)
    tokens = run(logits, batch, history=history, positions=positions).token_ids
    for i in range(num_seqs):
        strength = [values[i] for values in strengths.values()]
        row = penalised(logits[i], history[i, : positions[i]], num_prompt[i], *strength)
        # By value: equal logits may differ in the last bit of the reference.
        assert row[tokens[i]] == pytest.approx(row.max(), abs=1e-5)


def test_prompt_tokens_count_for_repetition_only():
    logits = np.zeros((4, 100), np.float32)
    logits[:, 5], logits[:, 6] = 2.0, 1.5
    history = np.full((4, 4), 5, np.int32)
    batch = make_batch(
        4,
        num_prompt_tokens=np.array([4, 4, 4, 3]),
        presence_penalty=np.array([2.0, 0.0, 0.0, 2.0]),
        frequency_penalty=np.array([0.0, 2.0, 0.0, 0.0]),
        repetition_penalty=np.array([1.0, 1.0, 2.0, 1.0]),
    )
    assert run(logits, batch, history=history, positions=4).token_ids.tolist() == [5, 5, 6, 6]


def test_penalties_come_after_edits():
    # (1 + 3) / 2 = 2 is less than 2.5; the other order would give 1 / 2 + 3 = 3.5.
    logits = np.zeros((4, 100), np.float32)
    logits[:, 9], logits[:, 70] = 1.0, 2.5
    history = np.full((4, 4), 9, np.int32)
    batch = make_batch(4, repetition_penalty=2.0, edits={i: [(9, 3.0)] for i in range(4)})
    assert run(logits, batch, history=history, positions=1).token_ids.tolist() == [70] * 4


# Log probabilities


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(4, 1000, seed=6)
    edits = {1: [(3, 100.0)], 2: [(int(logits[2].argmax()), -np.inf)]}
    temperature = np.array([0.0, 0.0, 0.0, 2.0])
    batch = make_batch(4, edits=edits, temperature=temperature, wants_logprobs=1)
    result = run(logits, batch, max_logprobs=20)
    expected = np.log(np.stack([softmax(row) for row in logits]))
    own = expected[np.arange(4), result.token_ids]
    np.testing.assert_allclose(result.logprobs, own, atol=1e-5)
    ranks = (logits >= logits[np.arange(4), result.token_ids][:, None]).sum(axis=1)
    np.testing.assert_array_equal(result.ranks, ranks)
    assert result.ranks[0] == 1
    assert result.ranks[2] == 2
    assert result.token_ids[1] == 3
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(result.top_ids, order)
    top = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_allclose(result.top_logprobs, top, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [90, 8192])
def test_equal_alternatives_come_in_order_of_id(vocab_size: int):
    logits = np.round(random_logits(3, vocab_size, seed=7))
    result = run(logits, make_batch(3, wants_logprobs=1), max_logprobs=20)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(result.top_ids, order)
    best = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_array_equal(result.ranks, best)  # ties share the last rank


def test_alternatives_past_the_vocabulary_have_no_probability():
    result = run(np.zeros((1, 3), np.float32), make_batch(1, wants_logprobs=1), max_logprobs=5)
    assert result.top_ids[0, :3].tolist() == [0, 1, 2]
    np.testing.assert_allclose(result.top_logprobs[0, :3], -np.log(3), atol=1e-6)
    assert (result.top_logprobs[0, 3:] == -np.inf).all()


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("max_logprobs", [0, 20])
def test_shapes_do_not_depend_on_what_is_wanted(wanted: int, max_logprobs: int):
    batch = make_batch(2, wants_logprobs=wanted)
    result = run(random_logits(2, 100), batch, max_logprobs=max_logprobs)
    shapes = {field.name: getattr(result, field.name).shape for field in dataclasses.fields(result)}
    assert shapes == {
        "token_ids": (2,),
        "logprobs": (2,),
        "ranks": (2,),
        "top_ids": (2, max_logprobs),
        "top_logprobs": (2, max_logprobs),
    }


# Masks


def pack(allowed: np.ndarray) -> np.ndarray:
    """Bits of bool `[num_seqs, vocab_size]`, made by numpy."""
    missing = -allowed.shape[1] % 32
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, missing))), axis=1, bitorder="little")
    return np.ascontiguousarray(bits).view(np.int32)


@pytest.mark.parametrize("vocab_size", [90, 1000, 8192])
def test_masked_rows_take_what_is_allowed_as_if_there_were_nothing_else(vocab_size: int):
    logits = random_logits(6, vocab_size, seed=11)
    rng = np.random.default_rng(12)
    allowed = rng.random(logits.shape) < 0.05
    allowed[:, rng.integers(0, vocab_size, 3)] = True
    allowed[0] = allowed[3] = True
    temperature = np.array([0.0, 0.0, 1.5, 1.5, 0.7, 0.0])
    fields = {"temperature": temperature, "top_p": 0.9, "top_k": 40}
    batch = make_batch(6, uses_masks=1, wants_logprobs=1, **fields)
    result = run(logits, batch, masks=pack(allowed), max_logprobs=20)
    assert allowed[np.arange(6), result.token_ids].all()
    masked = np.where(allowed, logits, -np.inf)
    greedy = temperature == 0
    np.testing.assert_array_equal(result.token_ids[greedy], masked.argmax(axis=1)[greedy])
    # Forbidding by a mask is the same as logits of minus infinity; rows without one do not notice.
    same = run(masked, make_batch(6, wants_logprobs=1, **fields), max_logprobs=20)
    for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(same, name))
    own = np.stack([softmax(row) for row in masked])[np.arange(6), result.token_ids]
    np.testing.assert_allclose(result.logprobs, np.log(own), atol=1e-5)


def test_masks_have_the_last_word_and_logprobs_know_nothing_else():
    logits = random_logits(2, 500, seed=13)
    allowed = np.zeros((2, 500), np.bool_)
    allowed[:, [3, 77, 499]] = True
    edits = {0: [(5, 100.0), (77, 100.0)], 1: [(5, 100.0)]}
    batch = make_batch(2, edits=edits, uses_masks=1, wants_logprobs=1, temperature=1.0)
    result = run(logits, batch, masks=pack(allowed), max_logprobs=3)
    assert result.token_ids[0] == 77
    assert result.token_ids[1] in (3, 77, 499)
    masked = np.where(allowed, logits, -np.inf)
    own = np.stack([softmax(row) for row in masked])[np.arange(2), result.token_ids]
    np.testing.assert_allclose(result.logprobs, np.log(own), atol=1e-5)
    assert sorted(result.top_ids[0].tolist()) == [3, 77, 499]


def test_masks_are_not_read_unless_they_are_used():
    logits = random_logits(2, 100, seed=14)
    nothing = pack(np.zeros((2, 100), np.bool_))
    result = run(logits, make_batch(2), masks=nothing)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(axis=1))


# Wide edits


@pytest.mark.parametrize("vocab_size", [90, 1000, 8192])
@pytest.mark.parametrize("wants_logprobs", [0, 1])
def test_rows_with_any_edits_take_the_best_of_what_numpy_leaves(vocab_size, wants_logprobs):
    """Grammar, allow-lists, biases on both ways and penalties, of which every row has its own."""
    num_seqs = 24
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(num_seqs, vocab_size, seed=15)
    expected = logits.copy()
    grammar = np.ones(logits.shape, np.bool_)
    allowed, biases, edits = {}, {}, {}
    for row in range(num_seqs):
        if row % 2:
            allowed[row] = rng.random(vocab_size) < rng.choice([0.1, 0.9])
        if row % 3:
            size = min(vocab_size, rng.choice([1, 65, 127, 128, 129, 256]))
            ids = rng.permutation(vocab_size)[:size]
            biases[row] = dict(zip(ids.tolist(), rng.normal(0, 9, ids.size), strict=True))
        if row % 4 == 0:
            edits[row] = [
                (int(rng.integers(vocab_size)), 7.0),
                (int(logits[row].argmax()), -np.inf),
            ]
        if row % 5 == 0:
            grammar[row] = rng.random(vocab_size) < 0.7
        for token, value in [*biases.get(row, {}).items(), *edits.get(row, [])]:
            expected[row, token] += np.float32(value)
        expected[row, ~(allowed.get(row, grammar[row]) & grammar[row])] = -np.inf
    history = rng.integers(0, vocab_size, (num_seqs, 20)).astype(np.int32)
    repetition = np.where(rng.random(num_seqs) < 0.5, 1.0, 1.4)
    for row in range(num_seqs):
        expected[row] = penalised(expected[row], history[row], 20, 0.0, 0.0, repetition[row])
    batch = make_batch(
        num_seqs,
        edits=edits,
        repetition_penalty=repetition,
        num_prompt_tokens=20,
        uses_masks=1,
        uses_wide_edits=1,
        num_wide_biases=max(map(len, biases.values())),
        wants_logprobs=wants_logprobs,
    )
    wide = wide_edits(num_seqs, vocab_size, allowed=allowed, biases=biases)
    result = run(
        logits,
        batch,
        history=history,
        positions=20,
        masks=pack(grammar),
        wide=wide,
        max_logprobs=20,
    )
    best = np.take_along_axis(expected, result.token_ids[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(best, expected.max(axis=1), rtol=1e-5)
    if wants_logprobs:  # of the model and its grammar: what else the caller forbids is not theirs
        masked = np.where(grammar, logits, -np.inf)
        own = np.stack([softmax(row) for row in masked])[np.arange(num_seqs), result.token_ids]
        np.testing.assert_allclose(result.logprobs, np.log(own), atol=1e-5)


def test_draws_stay_inside_of_an_allow_list_and_follow_its_biases():
    row = np.linspace(0.0, 2.0, 150)
    allowed = np.zeros(150, np.bool_)
    allowed[[3, 40, 77, 149]] = True
    rows = range(256)
    wide = wide_edits(
        256,
        150,
        allowed=dict.fromkeys(rows, allowed),
        biases={i: {3: 2.0, 5: 90.0, 149: -1.0} for i in rows},
    )
    logits = np.broadcast_to(row, (256, 150))
    batch = make_batch(256, temperature=1.0, uses_wide_edits=1, num_wide_biases=3)
    drawn = np.concatenate(
        [run(logits, batch, positions=i, wide=wide).token_ids for i in range(40)]
    )
    biased = row + np.where(np.arange(150) == 3, 2.0, np.where(np.arange(150) == 149, -1.0, 0.0))
    expected = softmax(np.where(allowed, biased, -np.inf))
    counts = np.bincount(drawn, minlength=150)
    assert set(drawn.tolist()) == {3, 40, 77, 149}
    for token in (3, 40, 77, 149):  # five standard deviations
        spread = 5 * np.sqrt(expected[token] * (1 - expected[token]) / drawn.size)
        assert counts[token] / drawn.size == pytest.approx(expected[token], abs=spread)
