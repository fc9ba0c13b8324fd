"""Batches of attention that are timed and checked, and the programs that compute them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.programs import Input, Program
from paged.attention import plan_attention, ragged_paged_attention
from paged.attention_call import AttentionCall
from paged.kv_write import write_kv

# Layers of a model share a plan, so its cost is shared out as in a model.
_REPEATS = 8

# Unit roundoff: the largest relative error of one rounding.
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A batch: pairs of (context length, query length), and the shape of the heads."""

    seqs: tuple[tuple[int, int], ...]
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def num_tokens(self) -> int:
        """Query rows."""
        return sum(query for _, query in self.seqs)

    @property
    def has_kv_scales(self) -> bool:
        """Whether keys and values are scaled: those of 8 bits are."""
        return self.cache_dtype is not None

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all contexts, each once."""
        width = jnp.dtype(self.cache_dtype or self.dtype).itemsize
        return sum(context for context, _ in self.seqs) * self._numbers_per_token * width

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over the keys that a row sees."""
        seen = sum(query * (2 * context - query + 1) // 2 for context, query in self.seqs)
        return 4 * seen * self.kv_heads * self.group * self.head_dim

    @property
    def _numbers_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def tables(self, num_blocks: int) -> dict[str, np.ndarray]:
        """Return shuffled block tables, lengths and query starts."""
        width = -(-max(context for context, _ in self.seqs) // self.block_size)
        free = iter(np.random.default_rng(0).permutation(np.arange(1, num_blocks)))
        tables = np.zeros((len(self.seqs), width), np.int32)
        for row, (context, _) in zip(tables, self.seqs, strict=True):
            count = -(-context // self.block_size)
            row[:count] = [next(free) for _ in range(count)]
        return {
            "tables": tables,
            "seq_lens": np.array([context for context, _ in self.seqs], np.int32),
            "starts": np.cumsum([0] + [query for _, query in self.seqs]).astype(np.int32),
        }

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return 1 + sum(-(-context // self.block_size) for context, _ in self.seqs)


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A batch to be timed, its figure, and what that should be."""

    batch: Batch
    unit: str
    first: float | None = None
    goal: float | None = None
    parts: tuple[str, ...] = ()


TIMED: Mapping[str, Timed] = {
    "decode 64 x 8k": Timed(Batch(((8192, 1),) * 64), "TB/s", 3.2, 3.9),
    "decode 64 x 8k e4m3": Timed(Batch(((8192, 1),) * 64, cache_dtype="float8_e4m3fn"), "TB/s"),
    "prefill 8k": Timed(Batch(((8192, 8192),)), "TFLOP/s", 350, 470),
    "decode 64k and 63 x 1k": Timed(Batch(((65536, 1),) + ((1024, 1),) * 63), "% of copy", 50, 75),
    "decode 1 x 32k": Timed(Batch(((32768, 1),)), "% of copy", 50, 70),
    "prefill 2k": Timed(Batch(((2048, 2048),)), "TFLOP/s"),
    "decode 64 x 2k": Timed(Batch(((2048, 1),) * 64), "TB/s"),
    "mixed 2k and 64 x 2k": Timed(
        Batch(((2048, 2048),) + ((2048, 1),) * 64),
        "% of parts",
        100,
        110,
        parts=("prefill 2k", "decode 64 x 2k"),
    ),
}

_MIXED = ((300, 1), (70, 70), (513, 257), (1, 1), (64, 64))
_DECODE = ((1500, 1), (1, 1), (16, 1), (257, 1))
CHECKED: Mapping[str, Batch] = {
    "mixed float32": Batch(_MIXED, dtype="float32"),
    "decode float32": Batch(_DECODE, dtype="float32"),
    "mixed bfloat16": Batch(_MIXED),
    "mixed float16": Batch(_MIXED, dtype="float16"),
    "mixed e4m3": Batch(_MIXED, cache_dtype="float8_e4m3fn"),
    "decode e4m3": Batch(_DECODE, cache_dtype="float8_e4m3fn"),
    "decode bfloat16": Batch(_DECODE, block_size=64),
    "window, sinks, group 8": Batch(
        _MIXED, kv_heads=2, group=8, head_dim=64, sliding_window=70, has_sinks=True
    ),
    "soft cap, head size 256": Batch(_MIXED, kv_heads=2, head_dim=256, soft_cap=20.0),
    "head size 80, group 1": Batch(_MIXED, kv_heads=2, group=1, head_dim=80),
}

# The same kinds with little in them, for a run on a CPU.
TINY_TIMED: Mapping[str, Timed] = {
    "decode 64 x 8k": dataclasses.replace(
        TIMED["decode 64 x 8k"],
        batch=Batch(((40, 1),) * 2, kv_heads=1, head_dim=64, dtype="float32"),
    )
}
TINY_CHECKED: Mapping[str, Batch] = {
    "mixed float32": Batch(
        ((40, 1), (20, 20), (1, 1)), kv_heads=1, head_dim=64, dtype="float32", has_sinks=True
    ),
    "decode float16": Batch(((40, 1), (17, 1)), kv_heads=1, head_dim=64, dtype="float16"),
    "decode e4m3": Batch(
        ((40, 1),), kv_heads=1, head_dim=64, dtype="float16", cache_dtype="float8_e4m3fn"
    ),
}


def attention_inputs(
    folder: pathlib.Path, stem: str, batch: Batch, *, poison: bool
) -> tuple[Input, ...]:
    """Return queries, cache, tables, lengths, starts, scales and sinks; writes some to a folder."""
    cache = (batch.num_blocks, 2, batch.kv_heads, batch.block_size, batch.head_dim)
    heads = batch.kv_heads * batch.group
    saved = []
    for name, array in batch.tables(batch.num_blocks).items():
        file = f"{stem.replace(' ', '_')}.{name}.npy"
        np.save(folder / file, array)
        saved.append(Input(array.shape, "int32", file))
    return (
        Input((batch.num_tokens, heads, batch.head_dim), batch.dtype),
        Input(cache, batch.cache_dtype or batch.dtype, is_poisoned=poison),
        *saved,
        Input((2, batch.kv_heads), "float32", "ones"),
        Input((heads,), "float32"),
    )


def timed_program(folder: pathlib.Path, name: str, timed: Timed) -> Program:
    """Return the record of a batch that is timed."""
    return Program(
        name,
        "attention",
        attention_inputs(folder, name, timed.batch, poison=False),
        # Queries of the next call are outputs, so that no call can be left out.
        carry=((0, 0),),
        repeats=_REPEATS,
        read_bytes=timed.batch.kv_bytes,
        flops=timed.batch.flops,
        unit=timed.unit,
        first=timed.first,
        goal=timed.goal,
        parts=timed.parts,
    )


def checked_program(folder: pathlib.Path, name: str, batch: Batch) -> Program:
    """Return the record of a batch whose outputs are compared with the reference's.

    An output is a mean of values, none of them beyond 6: weights and output are rounded to the
    dtype of the queries once each, and 64 roundings of float32 cover the logits.
    """
    unit = _UNIT_ROUNDOFF[batch.dtype]
    tolerance = 6 * (2 * unit + 64 * _UNIT_ROUNDOFF["float32"])
    inputs = attention_inputs(folder, name, batch, poison=True)
    return Program(name, "check", inputs, tolerance=tolerance)


def attend(batch: Batch, backend: str, repeats: int) -> Callable[..., tuple[jax.Array]]:
    """Return a function of the inputs that attends over and over, each time with the output."""

    def run(
        q: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        seq_lens: jax.Array,
        starts: jax.Array,
        scales: jax.Array,
        sinks: jax.Array,
    ) -> tuple[jax.Array]:
        options = options_of(batch, scales, sinks)
        shapes = {k: v for k, v in options.items() if k in ("sliding_window", "soft_cap")}
        call = AttentionCall.of(
            q, cache, kv_scales=options["kv_scales"], sinks=options["sinks"], **shapes
        )
        plan = plan_attention(tables, seq_lens, starts, call, backend=backend)
        attend_once = functools.partial(
            ragged_paged_attention, backend=backend, plan=plan, **options
        )
        for _ in range(repeats):
            q = attend_once(q, cache, tables, seq_lens, starts)
        return (q,)

    return run


def options_of(batch: Batch, scales: jax.Array, sinks: jax.Array) -> dict:
    """Return the keyword arguments of the op."""
    return {
        "sliding_window": batch.sliding_window,
        "soft_cap": batch.soft_cap,
        "kv_scales": scales if batch.has_kv_scales else None,
        "sinks": sinks if batch.has_sinks else None,
    }


def attend_in_float32(batch: Batch) -> Callable[..., tuple[jax.Array]]:
    """Return the reference: XLA, in float32 throughout."""

    def run(q: jax.Array, cache: jax.Array, *rest: jax.Array) -> tuple[jax.Array]:
        # A GPU would otherwise multiply float32 as TF32.
        with jax.default_matmul_precision("highest"):
            q, cache = q.astype(jnp.float32), cache.astype(jnp.float32)
            return attend(batch, "xla", 1)(q, cache, *rest)

    return run


WRITE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def write_program(folder: pathlib.Path, dtype: str) -> Program:
    """Return the record of a write of keys and values; results must be the same bits."""
    rows = "float32" if dtype.startswith("float8") else dtype
    name = f"write {dtype}"
    slots = np.random.default_rng(0).permutation(80)[:33].astype(np.int32)
    file = f"{name.replace(' ', '_')}.slots.npy"
    np.save(folder / file, slots)
    inputs = (
        Input((5, 2, 2, 16, 64), dtype),
        Input((33, 2, 64), rows, scale=3.0),
        Input((33, 2, 64), rows, scale=3.0),
        Input(slots.shape, "int32", file),
    )
    return Program(name, "check", inputs, tolerance=0.0)


def write(backend: str) -> Callable[..., tuple[jax.Array]]:
    """Return a function of the inputs of `write_program`."""

    def run(cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[jax.Array]:
        return (write_kv(cache, k, v, slots, backend=backend),)

    return run
