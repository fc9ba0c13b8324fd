"""What `ModelRunner` does around a step: blocks move first; each cache group has its tables."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest

from paged.cache_groups import CacheGroup, group_layers, layers_per_group, one_group
from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, init_random_params
from paged.models.programs import Program
from paged.scheduler.buckets import BucketTable
from paged.scheduler.output import ScheduledRequest, SchedulerOutput
from paged.scheduler.params import SamplingParams
from paged.scheduler.request import Request
from paged.scheduler.runner import ModelRunner
from paged.scheduler.step_programs import compile_programs, step_layout

CONFIG = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
)
BLOCK_SIZE = 4
READ = b"read"  # a key that asks the mover for what a block holds


@dataclass
class RecordingMover:
    """Moves token ids only, which is enough to see what lay where and when."""

    calls: list[str] = field(default_factory=list)
    saved: dict[bytes, list[int]] = field(default_factory=dict)

    def save(self, kv_cache: KVCache, blocks: Sequence[tuple[int, bytes]]) -> None:
        self.calls.append("save")
        for block_id, key in blocks:
            self.saved[key] = kv_cache.token_ids[block_id].tolist()

    def restore(self, kv_cache: KVCache, contents: Sequence[object]) -> KVCache:
        self.calls.append("restore")
        token_ids = kv_cache.token_ids
        for block_id, content in contents:
            token_ids = token_ids.at[block_id].set(np.array(content, np.int32))
        return KVCache(kv_cache.layers, token_ids)

    def copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> KVCache:
        self.calls.append("copy")
        token_ids = kv_cache.token_ids
        for source, destination in pairs:
            token_ids = token_ids.at[destination].set(token_ids[source])
        return KVCache(kv_cache.layers, token_ids)


@dataclass
class CountingSource:
    """Compiles programs, and counts the calls and the host arrays that they are called with."""

    calls: list[str] = field(default_factory=list)
    num_host_arrays: int = 0

    def make(self, program: Program) -> Any:
        compiled = program.compile()

        def call(*arguments: Any) -> Any:
            self.calls.append(program.name.split()[0])
            leaves = jax.tree.leaves(arguments)
            self.num_host_arrays += sum(not isinstance(leaf, jax.Array) for leaf in leaves)
            return compiled(*arguments)

        return call


def make_runner(
    mover: RecordingMover | None = None,
    config: ModelConfig = CONFIG,
    groups: tuple[CacheGroup, ...] = one_group(CONFIG.num_layers),
) -> ModelRunner:
    graphdef, _ = abstract_model(config, dtype="float32", cache_groups=groups)
    spec = KVCacheSpec(
        layers_per_group(groups), config.num_kv_heads, config.head_dim, BLOCK_SIZE, "float32"
    )
    return ModelRunner(
        graphdef,
        init_random_params(config, dtype="float32"),
        allocate_kv_cache(spec, 12),
        max_num_seqs=8,
        max_blocks_per_seq=4,
        vocab_size=config.vocab_size,
        num_groups=len(groups),
        block_mover=mover,
    )


@pytest.fixture(scope="module")
def mover() -> RecordingMover:
    return RecordingMover()


@pytest.fixture(scope="module")
def source() -> CountingSource:
    return CountingSource()


@pytest.fixture(scope="module")
def runner(mover: RecordingMover, source: CountingSource) -> Iterator[ModelRunner]:
    runner = make_runner(mover)
    runner.warmup(BucketTable(8, 8), store=source, progress=False)
    yield runner
    runner.close()


def prefill(token_ids: Sequence[int], block_id: int, version: int) -> ScheduledRequest:
    request = Request("r", tuple(token_ids), SamplingParams(), 4)
    request.block_tables[0] = [block_id]
    request.batch_row, request.table_version = 0, version
    return ScheduledRequest(request, 0, len(token_ids), samples=True)


def contents(runner: ModelRunner, mover: RecordingMover, block_id: int) -> list[int]:
    runner.execute(SchedulerOutput((), 0, saves=((block_id, READ),)))
    return mover.saved[READ]


def test_blocks_are_restored_saved_and_copied_before_the_step_writes(
    runner: ModelRunner, mover: RecordingMover
) -> None:
    runner.execute(SchedulerOutput((prefill([1, 2, 3, 4], 1, version=1),), 4)).result()
    mover.calls.clear()
    output = SchedulerOutput(
        (prefill([5, 6, 7, 8], 1, version=2),),
        4,
        block_copies=((1, 2), (3, 4)),
        saves=((1, b"old"), (3, b"restored")),
        restores=((3, [9, 9, 9, 9]),),
    )
    runner.execute(output).result()
    assert mover.calls == ["restore", "save", "copy"]
    assert mover.saved[b"old"] == [1, 2, 3, 4]
    assert mover.saved[b"restored"] == [9, 9, 9, 9]
    held = {block_id: contents(runner, mover, block_id) for block_id in (1, 2, 3, 4)}
    assert held == {1: [5, 6, 7, 8], 2: [1, 2, 3, 4], 3: [9] * 4, 4: [9] * 4}


def test_a_step_without_sequences_has_an_empty_result(runner: ModelRunner) -> None:
    result = runner.execute(SchedulerOutput((), 0)).result()
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None


def test_a_step_that_moves_blocks_needs_a_mover_and_a_step_needs_a_warmup(
    runner: ModelRunner,
) -> None:
    without = make_runner()
    output = SchedulerOutput((), 0, block_copies=((1, 2),))
    with pytest.raises(RuntimeError, match=r"Call warmup\(table\) before execute"):
        without.execute(output)
    without._table = BucketTable(8, 8)
    with pytest.raises(RuntimeError, match="make the runner with a block_mover"):
        without.execute(output)
    without.close()


def top_logprobs(runner: ModelRunner, block_tables: list[list[int]]) -> list[np.ndarray]:
    """Log probabilities along two chunks of a prompt and four decodes; the window is 4."""
    request = Request("r", tuple(range(20, 30)), SamplingParams(logprobs=5), 6)
    request.block_tables = block_tables
    request.batch_row = 3
    got = []
    for start, num_tokens in ((0, 5), (5, 5), (10, 1), (11, 1), (12, 1), (13, 1)):
        request.table_version += 1
        for table in request.block_tables[1:]:  # what has left the window is dropped
            num_outside = max(0, start - 3) // BLOCK_SIZE
            table[:num_outside] = [0] * num_outside
        samples = start + num_tokens >= request.num_prompt_tokens
        step = ScheduledRequest(request, start, num_tokens, samples)
        result = runner.execute(SchedulerOutput((step,), num_tokens)).result()
        if samples:
            assert result.logprobs is not None
            got.append(result.logprobs.top[0])
            request.output_token_ids.append(7 * start % 64)
    return got


def test_cache_groups_have_block_tables_of_their_own() -> None:
    config = replace(CONFIG, num_layers=2, layer_windows=(None, 4))
    groups = group_layers(config.layer_windows)
    assert len(groups) == 2
    grouped, whole = (make_runner(config=config, groups=g) for g in (groups, one_group(2)))
    for runner in (grouped, whole):
        runner.warmup(BucketTable(8, 8), progress=False)
    expected = top_logprobs(whole, [[5, 1, 9, 3]])
    got = top_logprobs(grouped, [[5, 1, 9, 3], [2, 8, 4, 7]])
    np.testing.assert_allclose(got, expected, atol=1e-6)
    # Tables that are mixed up are noticed.
    mixed = top_logprobs(grouped, [[5, 1, 9, 3], [5, 1, 9, 3]])
    assert np.abs(np.subtract(mixed, expected)).max() > 1e-3
    for runner in (grouped, whole):
        runner.close()


def test_a_step_sends_one_array_to_the_device(runner: ModelRunner, source: CountingSource) -> None:
    steps = (
        (SamplingParams(temperature=0), ["forward", "greedy"]),
        (SamplingParams(temperature=1), ["forward", "sample"]),
        (SamplingParams(temperature=0, logprobs=1), ["forward", "sample"]),
    )
    for version, (params, expected) in enumerate(steps):
        source.calls.clear()
        source.num_host_arrays = 0
        step = prefill(range(3), 1, version=100 + version)
        step.request.params = params
        runner.execute(SchedulerOutput((step,), 3)).result()
        assert source.calls == expected
        assert source.num_host_arrays == 1


@dataclass
class NamingSource:
    """Names the programs that are asked for."""

    names: list[str] = field(default_factory=list)

    def make(self, program: Program) -> None:
        self.names.append(program.name)


def test_each_shape_has_exactly_one_program() -> None:
    source, table = NamingSource(), BucketTable(32, 256)
    graphdef, params = abstract_model(CONFIG, dtype="float32")
    spec = KVCacheSpec(1, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE, "float32")
    compile_programs(
        table,
        functools.partial(step_layout, max_blocks_per_seq=4, vocab_size=64, num_groups=1),
        graphdef,
        params,
        jax.eval_shape(lambda: allocate_kv_cache(spec, 12)),
        max_num_seqs=32,
        store=source,
        progress=False,
    )
    assert len(set(source.names)) == len(source.names)
    kinds = Counter(name.split()[0] for name in source.names)
    # 8, 16, 32 decodes; 64, 128, 256 tokens; from 32 rows to 8 and 16.
    assert kinds == {"forward": 6, "greedy": 3, "sample": 3, "resize": 2, "score": 1}
