"""The block pool of a simulation, with its eviction policy by name; the offline optimum is here.

A name may carry one option after a colon: "lookahead:8" looks at the next 8 waiting requests and
"bip:0.125" keeps every 8th cold release. The engine's policies are those of `eviction/`; "optimal"
knows the whole trace and exists in the simulator only.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.eviction.lookahead import Lookahead
from paged.scheduler.eviction.policies import POLICIES as ENGINE_POLICIES
from paged.scheduler.eviction.policies import make_policy
from paged.scheduler.eviction.policy import EvictionPolicy
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.content import block_hashes
from paged.scheduler.simulator.trace import Trace

OPTIMAL = "optimal"
POLICIES = (*ENGINE_POLICIES, OPTIMAL)
"""Names of policies, without options."""

# The one option that a name may carry: argument of the policy and its type.
_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "lookahead": ("window", int),
    "bip": ("epsilon", float),
}

_QUEUED_FOR_LOOKAHEAD = 32
"""Requests that a closed loop keeps queued for a look-ahead of unlimited window."""


class OfflineOptimum(Lookahead):
    """Belady's rule over a whole trace: the most hits that any policy could have.

    Exact for requests that run one after the other; for several at once it takes the order of the
    trace for the order of uses. The queue tells it nothing new. It holds the keys of the whole
    trace.

    Args:
      requests: id and keys of the full prompt blocks of each, in the order of their admission.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966; that
    the cached set stays closed under parent changes nothing, as a parent's next use is never later.
    """

    def __init__(self, requests: Iterable[tuple[Hashable, Sequence[bytes]]]) -> None:
        super().__init__(window=None)
        for request_id, keys in requests:
            super().expect(request_id, keys)

    def expect(self, request_id: Hashable, keys: Sequence[bytes]) -> None:
        """Nothing: it is expected since the beginning."""


def make_pool(config: SimulationConfig, trace: Trace) -> BlockPool:
    """Return an empty pool for a run over `trace`.

    Raises: ValueError for an unknown policy or a bad option.
    """
    return BlockPool(
        config.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        policy=_make_policy(config, trace),
    )


def num_queued(config: SimulationConfig) -> int:
    """Return how many requests a closed loop keeps waiting behind those in service."""
    if config.num_queued is not None:
        return config.num_queued
    name, _, option = config.policy.partition(":")
    if name != "lookahead":
        return 0
    return int(option) if option else _QUEUED_FOR_LOOKAHEAD


def check_policy(policy: str) -> None:
    """Check a policy's name and option.

    Raises: ValueError saying what is wrong.
    """
    if policy != OPTIMAL:
        _engine_policy(policy)


def _make_policy(config: SimulationConfig, trace: Trace) -> EvictionPolicy:
    if config.policy != OPTIMAL:
        return _engine_policy(config.policy)
    size = config.block_size
    return OfflineOptimum(
        (str(index), block_hashes(request.prompt, size)) for index, request in enumerate(trace)
    )


def _engine_policy(policy: str) -> EvictionPolicy:
    name, colon, text = policy.partition(":")
    if not colon:
        if name not in ENGINE_POLICIES:
            raise ValueError(f"policy {policy!r} is unknown; choose from {', '.join(POLICIES)}.")
        return make_policy(name)
    if name not in _OPTIONS:
        raise ValueError(
            f"policy {policy!r}: only {', '.join(_OPTIONS)} take an option after a colon."
        )
    option, parse = _OPTIONS[name]
    try:
        return make_policy(name, **{option: parse(text)})
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}") from error
