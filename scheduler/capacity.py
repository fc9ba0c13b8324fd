"""From bytes of memory to blocks of KV cache, and what the log says about it; pure arithmetic."""

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from paged.kv_cache import KVCacheSpec
from paged.scheduler.errors import CapacityError

logger = logging.getLogger(__name__)

GIB = 2**30
# A CPU's memory is everybody's: without being asked for more, KV takes no more than this.
_MAX_CPU_KV_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a device can give.

    Attributes:
      total_bytes, free_bytes: of the device, before weights and KV cache exist.
      weight_bytes: of the parameters.
      activation_bytes: peak of temporaries in the largest step.
      shared_with_host: the device is the host itself (a CPU).
      num_devices: how many have as much to hold; those of a CPU share its memory.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    shared_with_host: bool
    num_devices: int = 1


def available_kv_bytes(budget: MemoryBudget, utilization: float) -> int:
    """Return the bytes that the KV cache may take on each device.

    On an accelerator the engine may use `utilization` of the whole device, weights included; on a
    CPU it takes that share of what is free, at most 2 GiB.

    Raises:
      CapacityError: if nothing is left.
    """
    needed = budget.weight_bytes + budget.activation_bytes
    if budget.shared_with_host:
        share_bytes = int(budget.free_bytes * utilization) // budget.num_devices
        available = min(share_bytes - needed, _MAX_CPU_KV_BYTES // budget.num_devices)
    else:
        used = budget.total_bytes - budget.free_bytes
        available = int(budget.total_bytes * utilization) - used - needed
    if available <= 0:
        raise CapacityError(
            f"No available memory for the cache blocks: {budget.free_bytes / GIB:.2f} GiB are "
            f"free, weights need {budget.weight_bytes / GIB:.2f} GiB, activations"
            f" {budget.activation_bytes / GIB:.2f} GiB and "
            f"gpu_memory_utilization is {utilization}; raise it, free memory, or lower "
            "max_num_batched_tokens."
        )
    return available


def blocks_per_request(
    spec: KVCacheSpec,
    max_model_len: int,
    windows: Sequence[int | None] = (None,),
    *,
    num_tokens_in_flight: int = 0,
) -> int:
    """Return the most blocks that one request ever holds, over all cache groups.

    A group with a sliding window holds the window, the tokens of steps in flight, and one block
    more, as a window may begin and end inside a block.

    Args:
      spec: what a block holds.
      max_model_len: longest prompt plus output, tokens.
      windows: sliding window of each cache group in tokens, None where every block is kept.
      num_tokens_in_flight: most tokens of one request in steps that are not done, which is the
        token budget times the number of such steps.

    Source: vLLM `v1/kv_cache_interface.py`.
    """
    num_blocks = 0
    for window in windows:
        if window is None:
            num_blocks += spec.blocks_for(max_model_len)
        else:
            num_tokens = min(window - 1 + num_tokens_in_flight, max_model_len)
            num_blocks += spec.blocks_for(num_tokens) + 1
    return num_blocks


def check_one_request_fits(
    spec: KVCacheSpec,
    num_blocks: int,
    max_model_len: int,
    windows: Sequence[int | None] = (None,),
    *,
    num_tokens_in_flight: int = 0,
) -> None:
    """Check that the pool can hold one request of full length beside the null block.

    Preemption can free everything but the last running request, so this is what guarantees that
    every admitted request ends. Arguments as in `blocks_per_request`.

    Raises:
      CapacityError: naming needed and available memory and the longest context that would fit.
    """

    def needed_for(num_tokens: int) -> int:
        return blocks_per_request(
            spec, num_tokens, windows, num_tokens_in_flight=num_tokens_in_flight
        )

    usable, needed = num_blocks - 1, needed_for(max_model_len)
    if needed <= usable:
        return
    longest = max(0, bisect.bisect_right(range(max_model_len), usable, key=needed_for) - 1)
    raise CapacityError(
        f"One request of max_model_len={max_model_len} needs {needed} KV blocks "
        f"({needed * spec.bytes_per_block / GIB:.2f} GiB) but only {max(usable, 0)} "
        f"({max(usable, 0) * spec.bytes_per_block / GIB:.2f} GiB) are available; lower "
        f"--max-model-len to {longest} or less, or give KV more memory "
        "(--gpu-memory-utilization, --kv-cache-memory-bytes, --num-gpu-blocks-override)."
    )


def describe_capacity(
    spec: KVCacheSpec,
    num_blocks: int,
    max_model_len: int,
    windows: Sequence[int | None] = (None,),
    *,
    num_tokens_in_flight: int = 0,
) -> str:
    """Return the line that operators grep for: cache size in tokens and maximum concurrency.

    Arguments as in `blocks_per_request`.
    """
    concurrency = num_blocks / blocks_per_request(
        spec, max_model_len, windows, num_tokens_in_flight=num_tokens_in_flight
    )
    tokens = int(concurrency * max_model_len)
    return (
        f"GPU KV cache size: {tokens:,} tokens, "
        f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x"
    )
