"""Logits and hidden states of the demo model at the last prompt token, in one cached prefill."""

import jax
import numpy as np
import pytest

from paged.kv_cache import KVCacheSpec, allocate_kv_cache
from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch
from paged.models.checkpoint import open_checkpoint
from paged.models.forward import abstract_model, compute_logits, forward
from paged.models.weights import load_params
from tests.e2e.golden import prompt_ids

BLOCK_SIZE = 16
SHORT, LONG = 320, 1344  # two shapes: one for most prompts, one for the longest


@pytest.fixture(scope="module")
def prefill(demo_model_path):
    """Return a function from token ids to (hidden, logits) of the last token."""
    checkpoint = open_checkpoint(str(demo_model_path))
    config = checkpoint.model_config
    graphdef, _ = abstract_model(config, dtype="float32")
    params = load_params(config, checkpoint.open_source(), dtype="float32", progress=False)
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype="float32",
    )
    num_blocks = LONG // BLOCK_SIZE + 1
    cache = allocate_kv_cache(spec, num_blocks)

    @jax.jit
    def run(params, cache, batch: ForwardBatch):
        hidden, _ = forward(graphdef, params, cache, batch)
        last = hidden[batch.logits_indices]
        return last, compute_logits(graphdef, params, last)

    def prefill(token_ids):
        length = len(token_ids)
        num_tokens = SHORT if length <= SHORT else LONG
        padded = np.zeros(num_tokens, np.int32)
        padded[:length] = token_ids
        row = np.arange(num_tokens, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=padded,
            positions=np.where(row < length, row, 0),
            attention=(
                AttentionMetadata(
                    block_tables=np.arange(1, num_blocks, dtype=np.int32)[None, :],
                    seq_lens=np.array([length], np.int32),
                    query_start_loc=np.array([0, length], np.int32),
                    slot_mapping=np.where(row < length, row + BLOCK_SIZE, 0),
                ),
            ),
            logits_indices=np.array([length - 1], np.int32),
        )
        hidden, logits = run(params, cache, batch)
        return np.asarray(hidden[0]), np.asarray(logits[0])

    return prefill


def test_last_position_equals_the_golden(prefill, smollm_golden):
    # Tolerances of the golden data: a cache and one full pass differ by up to 1.6e-4.
    close = {"atol": 1e-3, "rtol": 1e-4}
    for prompt in smollm_golden["prompts"]:
        hidden, logits = prefill(prompt_ids(prompt))
        golden = prompt["last_position"]
        name = prompt["name"]
        np.testing.assert_allclose(logits[:16], golden["logits_0_16"], **close, err_msg=name)
        np.testing.assert_allclose(hidden[:16], golden["hidden_0_16"], **close, err_msg=name)
        assert int(logits.argmax()) == golden["logits_argmax"], name
        for statistic in ("max", "mean", "std"):
            expected = golden[f"logits_{statistic}"]
            assert getattr(logits, statistic)() == pytest.approx(expected, abs=1e-3), name
        assert np.linalg.norm(hidden) == pytest.approx(golden["hidden_l2"], rel=1e-4), name
