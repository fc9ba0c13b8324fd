"""`SimulationConfig`: what serves a trace, without the trace."""

from dataclasses import dataclass

from paged.scheduler.eviction.policies import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What serves the trace; names and defaults are the engine's.

    Attributes:
      num_blocks: KV blocks, the null block included; at least 2.
      block_size: tokens per block.
      policy: an eviction policy's name with or without an option, or "optimal" (see `pools`).
      concurrency: requests in service at once, the next one being sent when one ends (a closed
        loop, whatever the trace's arrival times); None lets requests arrive when the trace says.
      num_queued: further requests that a closed loop keeps in the waiting queue; None: as many as
        the policy looks ahead to, 0 for those that do not.
      max_num_seqs, max_num_batched_tokens: limits of a step.
      max_model_len: longest prompt plus output; None is what the pool can hold.
      scheduling_policy: "fcfs" or "priority", which looks at the trace's priorities.
      long_prefill_token_threshold, enable_chunked_prefill: as in `Scheduler`.
      enable_prefix_caching: share blocks between requests.
      skip_decodes: leave rows out of steps in which nothing can happen to them; the result is the
        same, and several times faster to get.

    Raises: ValueError for a pool of fewer than 2 blocks, or a loop of less than one request.
    """

    num_blocks: int
    block_size: int = 16
    policy: str = DEFAULT_POLICY
    concurrency: int | None = None
    num_queued: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    skip_decodes: bool = True

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks={self.num_blocks} must be at least 2: block 0 is the null block."
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} must be at least 1.")
        if self.num_queued is not None and self.num_queued < 0:
            raise ValueError(f"num_queued={self.num_queued} must be at least 0.")
