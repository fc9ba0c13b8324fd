"""Runs token chunks of several sequences through `forward` over one shuffled paged cache."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from paged.cache_groups import CacheGroup, layers_per_group, one_group
from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.metadata import AttentionMetadata
from paged.models.batch import ForwardBatch
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, compute_logits, forward
from paged.models.lora import LoRAStack
from paged.models.programs import Program
from paged.models.sharded_programs import ShardedPrograms
from paged.models.tensor_parallel import TensorParallel
from paged.sharding import KV_CACHE_AXES, ShardingRules

RULES = ShardingRules()
BLOCK_SIZE = 4
NUM_TOKENS, NUM_SEQS, MAX_BLOCKS = 64, 3, 16  # one static shape, so one compilation per model


class Jitted:
    """A source whose programs are compiled when they are first called."""

    def make(self, program: Program) -> Any:
        return jax.jit(program.function, donate_argnums=program.donated)


class PagedModel:
    """A model, its cache and the block tables of the sequences it has seen, by cache group.

    With a `mesh` the parameters are those of `TensorParallel(config, mesh.size).whole`, split.
    With `loras`, sequence i has the adapter in slot `lora_slots[i]`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: nnx.State[Any, Any],
        *,
        dtype: str,
        quantization: str | None = None,
        cache_sharding: jax.sharding.Sharding | None = None,
        cache_groups: tuple[CacheGroup, ...] | None = None,
        attention_backend: str = "xla",
        mesh: jax.sharding.Mesh | None = None,
        rules: ShardingRules = RULES,
        loras: LoRAStack | None = None,
        lora_slots: Sequence[int] = (0,) * NUM_SEQS,
    ) -> None:
        self.loras, self.lora_slots = loras, lora_slots
        self.groups = groups = cache_groups or one_group(config.num_layers)
        split = TensorParallel(config, 1 if mesh is None else mesh.size, rules)
        if mesh is not None:
            cache_sharding = rules.named_sharding(mesh, KV_CACHE_AXES)
        graphdef, _ = abstract_model(
            split.part,
            dtype=dtype,
            attention_backend=attention_backend,
            cache_groups=cache_groups,
            quantization=quantization,
            split_by=None if mesh is None else rules,
        )
        spec = KVCacheSpec(
            layers_per_group(groups), split.whole.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype
        )
        num_blocks = 1 + len(groups) * NUM_SEQS * MAX_BLOCKS
        self.params = params
        self.cache = allocate_kv_cache(spec, num_blocks, cache_sharding)
        shuffled = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
        self.block_tables = shuffled.reshape(-1, NUM_SEQS, MAX_BLOCKS).astype(np.int32)
        self.num_computed = [0] * NUM_SEQS

        def step(
            params: nnx.State[Any, Any],
            cache: KVCache,
            batch: ForwardBatch,
            loras: LoRAStack | None,
        ) -> tuple[Array, KVCache]:
            hidden, cache = forward(graphdef, params, cache, batch, loras)
            return compute_logits(graphdef, params, hidden), cache

        source = Jitted() if mesh is None else ShardedPrograms(mesh, Jitted())
        arguments = (params, self.cache, self._batch({}), loras)
        self._step = source.make(Program("step", step, arguments, (0, self.cache), donated=(1,)))

    def logits(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Append the chunks to their sequences; return float32 `[len(chunk), vocab]` of each."""
        batch = self._batch(chunks)
        logits, self.cache = self._step(self.params, self.cache, batch, self.loras)
        ends = np.cumsum([len(chunk) for chunk in chunks.values()])
        parts = np.split(np.asarray(logits), ends)
        return dict(zip(chunks, parts, strict=False))  # the last part is padding

    def _batch(self, chunks: Mapping[int, Sequence[int]]) -> ForwardBatch:
        names = ("ids", "positions", "lora_ids")
        arrays = {name: np.zeros(NUM_TOKENS, np.int32) for name in names}
        num_groups = len(self.block_tables)
        slots = np.zeros((num_groups, NUM_TOKENS), np.int32)
        block_tables = np.zeros((num_groups, NUM_SEQS, MAX_BLOCKS), np.int32)
        seq_lens = np.zeros(NUM_SEQS, np.int32)
        query_start_loc = np.zeros(NUM_SEQS + 1, np.int32)
        start = 0
        for row, (sequence, chunk) in enumerate(chunks.items()):
            positions = self.num_computed[sequence] + np.arange(len(chunk))
            rows = slice(start, start + len(chunk))
            tables = self.block_tables[:, sequence]
            arrays["ids"][rows] = chunk
            arrays["positions"][rows] = positions
            arrays["lora_ids"][rows] = self.lora_slots[sequence]
            blocks = tables[:, positions // BLOCK_SIZE]
            slots[:, rows] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            self.num_computed[sequence] += len(chunk)
            block_tables[:, row] = tables
            seq_lens[row] = self.num_computed[sequence]
            start += len(chunk)
            query_start_loc[row + 1 :] = start
        return ForwardBatch(
            token_ids=arrays["ids"],
            positions=arrays["positions"],
            attention=tuple(
                AttentionMetadata(
                    block_tables=block_tables[group],
                    seq_lens=seq_lens,
                    query_start_loc=query_start_loc,
                    slot_mapping=slots[group],
                )
                for group in range(num_groups)
            ),
            logits_indices=np.maximum(query_start_loc[1:] - 1, 0),
            lora_ids=None if self.loras is None else arrays["lora_ids"],
        )


def prefill_in_chunks(
    model: PagedModel, prompts: Mapping[int, Sequence[int]], chunk_sizes: Mapping[int, int]
) -> dict[int, np.ndarray]:
    """Return logits of all prompt positions, `[len(prompt), vocab]`, computed chunk by chunk."""
    num_steps = max(math.ceil(len(prompts[i]) / chunk_sizes[i]) for i in prompts)
    parts: dict[int, list[np.ndarray]] = {sequence: [] for sequence in prompts}
    for step in range(num_steps):
        chunks = {
            sequence: prompt[step * size : (step + 1) * size]
            for sequence, prompt in prompts.items()
            if (size := chunk_sizes[sequence]) * step < len(prompt)
        }
        for sequence, logits in model.logits(chunks).items():
            parts[sequence].append(logits)
    return {sequence: np.concatenate(arrays) for sequence, arrays in parts.items()}
