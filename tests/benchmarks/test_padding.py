"""The simulation of padding, on few requests."""

import pytest

from benchmarks.padding import COLUMNS, MACHINES, arrivals, measure


@pytest.mark.parametrize("rate", [10, 40])
def test_little_of_what_a_gpu_computes_is_padding(rate):
    machine = next(machine for machine in MACHINES if machine.platform == "gpu")
    row = measure(machine, rate, 120, plain=False)
    assert row.keys() == COLUMNS.keys()
    assert 0 < row["padding_percent"] < 10
    plain = measure(machine, rate, 120, plain=True)
    assert plain["padding_percent"] > 2 * row["padding_percent"] and plain["mean_ttft_ms"] > 0.9 * row["mean_ttft_ms"]


def test_arrivals_are_a_poisson_process_with_the_same_requests_at_any_rate():
    slow, fast = arrivals(4000, 2.0), arrivals(4000, 8.0)
    assert [(a.input_len, a.output_len) for a in slow] == [(a.input_len, a.output_len) for a in fast]
    assert slow[-1].at == pytest.approx(2000, rel=0.1) and fast[-1].at == pytest.approx(500, rel=0.1)
    assert sum(a.input_len for a in slow) / 4000 == pytest.approx(161, rel=0.1)
    assert sum(a.output_len for a in slow) / 4000 == pytest.approx(338, rel=0.1)
