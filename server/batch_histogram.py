"""`BatchHistogram`: a Prometheus histogram that takes many observations at once."""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class BatchHistogram(Collector):
    """What `prometheus_client.Histogram` shows, for one set of labels.

    That one takes a lock and a loop over the buckets per observation, a microsecond for every
    token of every step. Of the gaps between tokens nearly all of a step are equal.

    Args:
      name, text: of the metric.
      labels: of its one series.
      buckets: upper bounds, ascending; the infinite one is added.
      registry: that shows it.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = [*map(float, buckets), math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe_all(self, values: Iterable[float]) -> None:
        """Record observations; equal ones cost as much as one."""
        for value, count in Counter(values).items():
            self._counts[bisect.bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric with its series, as the registry asks for it."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        total = 0
        buckets = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            le = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((le, float(total)))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
