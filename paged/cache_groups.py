"""`group_layers`: which layers share block tables, when some attend to a sliding window only.

All groups have the same number of layers, so a block of any of them holds the same bytes: one pool
and one set of arrays serve all, and array j is that of layer j of every group. A request has one
block table per group; block ids keep the groups apart (docs/decisions/0017).
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A group may be padded with layers that do not exist while the larger count is below this multiple
# of the smaller one; beyond, the larger kind of layer is cut into several groups.
_MAX_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table per request.

    Attributes:
      layers: layer numbers; the j-th uses array j of the cache.
      sliding_window: tokens, the newest included, that a later token can see; blocks before them
        can be freed. None: every block is kept.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None


def group_layers(layer_windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model.

    Args:
      layer_windows: sliding window of each layer, None for full attention.

    Returns:
      Groups of full attention first. The first group never drops a block, so that the tokens of a
      request can be read back through its table (docs/decisions/0011); a model of sliding layers
      alone is therefore one group that keeps all its blocks.

    Source: vLLM `v1/core/kv_cache_utils.py`.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        by_window.setdefault(window, []).append(layer)
    if None not in by_window or len(by_window) == 1:
        return one_group(len(layer_windows))
    counts = [len(layers) for layers in by_window.values()]
    fewest, most = min(counts), max(counts)
    group_size = most if most < _MAX_PADDING * fewest else fewest
    full = {None: by_window.pop(None)}
    groups = []
    for window, layers in (full | by_window).items():
        num_groups = -(-len(layers) // group_size)
        # Strided, so that the groups of one kind differ by at most one layer.
        groups += [CacheGroup(tuple(layers[i::num_groups]), window) for i in range(num_groups)]
    return tuple(groups)


def one_group(num_layers: int) -> tuple[CacheGroup, ...]:
    """Return the one group of a model whose layers all keep every block."""
    return (CacheGroup(tuple(range(num_layers))),)


def layers_per_group(groups: Sequence[CacheGroup]) -> int:
    """Return the number of arrays that the groups share, `KVCacheSpec.num_layers`."""
    return max(len(group.layers) for group in groups)
