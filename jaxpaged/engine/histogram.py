"""A Prometheus histogram that takes a whole step's values at a time, for thousands of tokens a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """The values under one set of labels.

    Attributes:
      counts: values up to each bound and above the one before it; the last, of those above all.
      total: their sum.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value. Negative values (times from two clocks that disagree) count as 0."""
        value = max(0.0, value)
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Counts several, none of them negative."""
        bounds, counts = self._bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)


class Histogram(Collector):
    """Series by label values. Written in one thread; any may collect, and sees each series at some moment.

    Args:
      names: under each of these the same is told.
      documentation: what the values are.
      label_names: of every series.
      bounds: upper bounds of the buckets, increasing; one without bound comes last by itself.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        names: Sequence[str],
        documentation: str,
        label_names: Sequence[str],
        bounds: Sequence[float],
    ):
        self._names, self._documentation, self._label_names = names, documentation, label_names
        self._bounds = tuple(map(float, bounds))
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these labels; to be kept by who writes to it often."""
        return self._series.setdefault(values, Series(self._bounds))

    def describe(self) -> list[Metric]:
        """The families without series."""
        return [HistogramMetricFamily(name, self._documentation, labels=self._label_names) for name in self._names]

    def collect(self) -> list[Metric]:
        """The families as Prometheus scrapes them."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        families = self.describe()
        for family in families:
            assert isinstance(family, HistogramMetricFamily)
            for labels, series in list(self._series.items()):  # new ones may come meanwhile
                sums, so_far = [], 0
                for count in list(series.counts):
                    so_far += count
                    sums.append(float(so_far))
                family.add_metric(labels, list(zip(bounds, sums, strict=True)), series.total)
        return families
