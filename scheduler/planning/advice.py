"""`suggest`: flags of `paged serve` for a plan, each with its reason in numbers."""

from dataclasses import dataclass

from paged.models.config import ModelConfig
from paged.scheduler.capacity import GIB
from paged.scheduler.config import StepLimits
from paged.scheduler.planning.fit import Fit
from paged.scheduler.planning.speed import Speed
from paged.scheduler.planning.workload import Workload, prefill_loads
from paged.scheduler.simulator.step_cost import StepLoad

BLOCK_SIZES = (16, 32, 64, 128)
"""What the GPU kernels take."""

# Share of a request's cache that larger blocks may leave empty before smaller ones are better.
_MAX_WASTE = 0.02
# Long contexts and many sequences are rounded down to a multiple of these.
_ROUND_LENGTH, _ROUND_SEQS, _ROUND_SEQS_ABOVE = 256, 8, 64
_STEP_SIZES = (2048, 4096, 8192, 16384)
# A step's arithmetic should take this many times as long as reading the weights.
_ENOUGH = 2.0


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A flag, its value, and why; `is_trade`: it costs something else, so users decide."""

    flag: str
    value: str
    reason: str
    is_trade: bool = False


def suggest(speed: Speed, *, kv_cache_dtype_is_open: bool) -> list[Suggestion]:
    """Return the flags to start `paged serve` with.

    Args:
      speed: of the chosen fit.
      kv_cache_dtype_is_open: whether an fp8 cache may be suggested.
    """
    step_tokens = _step_tokens(speed)
    found = [
        *_parallelism(speed.fit),
        *_quantization(speed.model, speed.fit),
        *_context(speed.model, speed.fit, speed.workload),
        _sequences(speed, int(step_tokens.value)),
        step_tokens,
        _block_size(speed.fit, speed.workload),
    ]
    return found + (_kv_cache_dtype(speed) if kv_cache_dtype_is_open else [])


def best_block_size(workload: Workload) -> int:
    """Return the largest block size whose empty slots are few beside a request."""
    sizes = [size for size in BLOCK_SIZES if _waste(workload, size) <= _MAX_WASTE]
    return max(sizes, default=BLOCK_SIZES[0])


def _waste(workload: Workload, block_size: int) -> float:
    """Return the share of a request's cache that is lost.

    Half of the last block, on average, and what of a shared prefix fills no block and so is not
    shared.
    """
    lost = block_size / 2 + workload.shared_prefix_len % block_size
    return lost / workload.total_len


def _parallelism(fit: Fit) -> list[Suggestion]:
    if fit.num_gpus == 1:
        return []
    size = fit.weights.total * fit.num_gpus / GIB
    reason = f"{size:.1f} GiB of weights in {fit.weights_name}; each GPU holds "
    reason += f"{fit.weights.total / GIB:.1f} GiB and has {fit.kv_bytes / GIB:.1f} GiB left for KV"
    return [Suggestion("--tensor-parallel-size", str(fit.num_gpus), reason)]


def _quantization(model: ModelConfig, fit: Fit) -> list[Suggestion]:
    if fit.config.quantization is None or model.quantization is not None:
        return []  # a quantised checkpoint needs no flag
    reason = f"weights of {fit.weights.total / GIB:.1f} GiB per GPU instead of 16 bits each"
    return [Suggestion("--quantization", fit.config.quantization, reason)]


def _context(model: ModelConfig, fit: Fit, workload: Workload) -> list[Suggestion]:
    """A server refuses to start where one request of full length would not fit."""
    limit = model.max_position_embeddings
    longest = fit.longest_request(limit)
    if longest >= limit:
        return []
    rounded = max(workload.total_len, longest // _ROUND_LENGTH * _ROUND_LENGTH)
    reason = f"one request of the model's {limit:,} tokens does not fit; {longest:,} do"
    return [Suggestion("--max-model-len", str(rounded), reason)]


def _sequences(speed: Speed, step_tokens: int) -> Suggestion:
    total, knee = speed.workload.total_len, speed.knee()
    held = speed.fit.requests(total)
    value, reason = held, f"the cache holds {held:,} requests of {total:,} tokens"
    if knee.arithmetic is not None and knee.arithmetic < held:
        value = knee.arithmetic
        reason = f"from {value:,} on arithmetic is the limit: more at once only wait for each other"
    # More would take memory that is counted as cache: logits of every sequence.
    planned = StepLimits.of(speed.fit.config).max_num_seqs
    if value > planned:
        value = planned
        reason = f"planned for; the cache holds {held:,} requests, so try more with --max-num-seqs"
    if value > step_tokens:
        value, reason = step_tokens, f"a step has no more than {step_tokens:,} tokens"
    if value > _ROUND_SEQS_ABOVE:
        value = value // _ROUND_SEQS * _ROUND_SEQS
    return Suggestion("--max-num-seqs", str(value), reason)


def _step_tokens(speed: Speed) -> Suggestion:
    """The smallest step that arithmetic dominates: larger ones only make others wait longer."""
    roofline = speed.roofline

    def load(num_tokens: int) -> StepLoad:
        (only,) = prefill_loads(speed.model, num_tokens, budget=num_tokens)
        return only

    def is_enough(num_tokens: int) -> bool:
        work = roofline.step_work(load(num_tokens))
        reading = roofline.memory_seconds(work.weight_bytes)
        return roofline.compute_seconds(work) >= _ENOUGH * reading

    value = next((size for size in _STEP_SIZES if is_enough(size)), _STEP_SIZES[-1])
    milliseconds = 1000 * roofline.step_seconds(load(value))
    reason = "keeps arithmetic busy while weights are read once; a full step takes "
    reason += f"{milliseconds:.0f} ms, the longest gap that others see between two tokens"
    return Suggestion("--max-num-batched-tokens", str(value), reason)


def _block_size(fit: Fit, workload: Workload) -> Suggestion:
    value = best_block_size(workload)
    waste = _waste(workload, value)
    spec = fit.spec
    num_runs = spec.num_planes * spec.num_layers * spec.num_kv_heads
    run = value * spec.bytes_per_token // num_runs
    reason = f"{waste:.1%} of a request's {workload.total_len:,} tokens lies empty or unshared; "
    reason += f"a head's keys are read {run / 1024:g} KiB at a time"
    return Suggestion("--block-size", str(value), reason)


def _kv_cache_dtype(speed: Speed) -> list[Suggestion]:
    knee, held = speed.knee(), speed.fit.requests(speed.workload.total_len)
    if knee.reason != "KV cache" and held >= knee.batch:
        return []
    limit = f"reading the cache limits batches of {knee.batch:,} and more"
    if held < knee.batch:
        limit = f"memory ends at {held:,} requests, before the knee at {knee.batch:,}"
    reason = f"{limit}; half the bytes, but rounded keys and values: test your answers"
    return [Suggestion("--kv-cache-dtype", "fp8", reason, is_trade=True)]
