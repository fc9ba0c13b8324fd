"""The eviction policies by name."""

from collections.abc import Callable

from paged.scheduler.eviction.arc import ARC
from paged.scheduler.eviction.auto import Auto
from paged.scheduler.eviction.cost import CostAware
from paged.scheduler.eviction.insertion import LIP
from paged.scheduler.eviction.lookahead import Lookahead
from paged.scheduler.eviction.policy import EvictionPolicy
from paged.scheduler.eviction.recency import LRU, MRU

_MAKERS: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": LRU,
    "mru": MRU,
    "lip": LIP,
    "bip": lambda epsilon=1 / 16: LIP(epsilon),
    "arc": ARC,
    "cost": CostAware,
    "lookahead": Lookahead,
    "auto": Auto,
}

POLICIES = tuple(_MAKERS)
"""Names that `make_policy` knows."""

DEFAULT_POLICY = "auto"
"""Adapts without knowing the queue; docs/eviction.md has its figures."""


def make_policy(name: str, **options: object) -> EvictionPolicy:
    """Return a new policy; `options` are arguments of its class.

    Raises: ValueError for an unknown name.
    """
    if name not in _MAKERS:
        raise ValueError(f"eviction policy {name!r} is unknown; choose from {', '.join(POLICIES)}.")
    return _MAKERS[name](**options)
