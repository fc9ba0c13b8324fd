"""Models that mix full and sliding layers: grouped caches give what one full cache gives."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache_groups import group_layers
from paged.kv_cache import NULL_BLOCK, KVCache
from paged.models.config import ModelConfig
from tests.models.dense import dense_logits, random_params
from tests.models.helpers import BLOCK_SIZE, MAX_BLOCKS, PagedModel, prefill_in_chunks

WINDOW = 8
QWEN2 = ModelConfig(
    "Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    attention_bias=True,
)
CHUNK_SIZES = {0: 7, 1: 16, 2: 1}
LAYER_WINDOWS = {
    "full then sliding": (None, WINDOW, WINDOW),
    "padded group": (WINDOW, None, WINDOW, None, WINDOW, None, WINDOW),
    "two windows": (WINDOW, None, 2 * WINDOW + 3),
}


class ForgetfulModel(PagedModel):
    """Before each step, the blocks that have left a group's window become somebody else's."""

    num_dropped = 0

    def logits(self, chunks):
        is_dropped = np.zeros((self.cache.num_blocks, 1, 1, 1, 1), np.bool_)
        is_dropped[NULL_BLOCK] = True
        for group, members in enumerate(self.groups):
            for sequence, num_computed in enumerate(self.num_computed):
                if members.sliding_window is None:
                    continue
                # The next token sees itself and `sliding_window - 1` before it.
                num_outside = max(0, num_computed - members.sliding_window + 1) // BLOCK_SIZE
                table = self.block_tables[group, sequence]
                is_dropped[table[:num_outside]] = True
                table[:num_outside] = NULL_BLOCK
        self.num_dropped += is_dropped.sum() - 1
        # What another request may have left there; NaN would survive any arithmetic.
        layers = tuple(jnp.where(is_dropped, jnp.nan, layer) for layer in self.cache.layers)
        self.cache = KVCache(layers, self.cache.token_ids)
        return super().logits(chunks)


def make_prompts() -> dict[int, list[int]]:
    rng = np.random.default_rng(0)
    lengths = {0: 5 * WINDOW + 3, 1: 6 * WINDOW, 2: WINDOW + 1}
    return {i: rng.integers(0, 64, length).tolist() for i, length in lengths.items()}


@pytest.mark.parametrize("layer_windows", LAYER_WINDOWS.values(), ids=LAYER_WINDOWS.keys())
def test_groups_that_drop_blocks_give_the_logits_of_one_group_that_keeps_all(
    layer_windows: tuple[int | None, ...],
) -> None:
    config = replace(QWEN2, num_layers=len(layer_windows), layer_windows=layer_windows)
    params = random_params(config)
    prompts = make_prompts()
    grouped = ForgetfulModel(
        config, params, dtype="float32", cache_groups=group_layers(layer_windows)
    )
    whole = PagedModel(config, params, dtype="float32")
    got = prefill_in_chunks(grouped, prompts, CHUNK_SIZES)
    expected = prefill_in_chunks(whole, prompts, CHUNK_SIZES)
    for i, prompt in prompts.items():
        # Which block holds a key changes no sum, so they differ by nothing at all on a CPU.
        np.testing.assert_allclose(got[i], expected[i], atol=1e-6)
        dense = dense_logits(config, params, prompt)
        np.testing.assert_allclose(got[i], dense, atol=2e-4, rtol=1e-5)

    for step in range(2 * WINDOW - 2):  # decodes, all sequences in one batch
        chunks = {i: [(7 * step + i) % 64] for i in prompts}
        got, expected = grouped.logits(chunks), whole.logits(chunks)
        for i in prompts:
            prompts[i] += chunks[i]
            np.testing.assert_allclose(got[i], expected[i], atol=1e-6)
    for i, prompt in prompts.items():
        dense = dense_logits(config, params, prompt)[-1:]
        np.testing.assert_allclose(got[i], dense, atol=2e-4, rtol=1e-5)
    assert grouped.num_dropped > 20
    # Penalties read the tokens of a request through its first table.
    stored = np.asarray(grouped.cache.token_ids)[grouped.block_tables[0]]
    for i, prompt in prompts.items():
        assert stored[i].reshape(MAX_BLOCKS * BLOCK_SIZE)[: len(prompt)].tolist() == prompt


def test_a_window_in_every_layer_is_applied_in_one_group_that_keeps_all() -> None:
    config = replace(QWEN2, layer_windows=(WINDOW,) * 3)
    params = random_params(config)
    prompts = make_prompts()
    model = ForgetfulModel(
        config, params, dtype="float32", cache_groups=group_layers(config.layer_windows)
    )
    logits = prefill_in_chunks(model, prompts, CHUNK_SIZES)
    for i, prompt in prompts.items():
        expected = dense_logits(config, params, prompt)
        np.testing.assert_allclose(logits[i], expected, atol=2e-4, rtol=1e-5)
        full = dense_logits(replace(config, layer_windows=()), params, prompt)
        assert abs(full - expected).max() > 0.01  # the windows matter
