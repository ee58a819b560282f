"""Histograms as Prometheus reads them."""

import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.engine.histogram import Histogram


def samples(registry: CollectorRegistry) -> dict[str, float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {s.name + (f"[{s.labels['le']}]" if "le" in s.labels else ""): s.value for f in families for s in f.samples}


def test_a_value_on_a_bound_is_below_it():
    registry = CollectorRegistry()
    series = Histogram(registry, ["h"], "text", ["engine"], [1, 2.5]).labels("0")
    series.observe_all([0.5, 1.0, 2.0])
    series.observe(9)
    assert samples(registry) == {
        "h_bucket[1.0]": 2, "h_bucket[2.5]": 3, "h_bucket[+Inf]": 4, "h_count": 4, "h_sum": 12.5,
    }  # fmt: skip


def test_two_clocks_that_disagree_make_no_negative_time():
    registry = CollectorRegistry()
    Histogram(registry, ["h"], "text", [], [1]).labels().observe(-0.25)
    assert samples(registry) == {"h_bucket[1.0]": 1, "h_bucket[+Inf]": 1, "h_count": 1, "h_sum": 0}


def test_two_names_tell_the_same_and_no_name_comes_twice():
    registry = CollectorRegistry(auto_describe=True)
    Histogram(registry, ["new", "old"], "text", [], [1]).labels().observe(3)
    found = samples(registry)
    assert found["new_sum"] == found["old_sum"] == 3
    with pytest.raises(ValueError, match="old"):
        Histogram(registry, ["old"], "text", [], [1])


def test_labels_give_the_same_series_again():
    histogram = Histogram(CollectorRegistry(), ["h"], "text", ["stage"], [1])
    assert histogram.labels("a") is histogram.labels("a") is not histogram.labels("b")


def test_collected_while_series_come():
    """A scrape is written in another thread than that of the engine's steps: its buckets add up all the same."""
    registry = CollectorRegistry()
    histogram = Histogram(registry, ["h"], "text", ["label"], [1, 2])
    done = threading.Event()

    def write() -> None:
        for i in range(3000):
            histogram.labels(str(i)).observe_all([0.5, 1.5, 2.5])
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            (family,) = histogram.collect()
            for bucket in zip(*[iter(family.samples)] * 5, strict=True):  # three buckets, the count, the sum
                values = [sample.value for sample in bucket[:4]]
                assert values == sorted(values) and values[2] == values[3]
    finally:
        sys.setswitchinterval(before)
        writer.join()
