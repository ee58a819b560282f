"""Several observers as one, and what they are told of requests."""

import logging

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.observer import Observers, RequestEnd, StepTokens, WatchedRequest
from jaxpaged.engine.output import RequestMetrics
from jaxpaged.engine.stats import EngineStats


class Broken:
    def on_added(self, request):
        raise ZeroDivisionError

    def on_step(self, core_index, stats, tokens):
        raise ZeroDivisionError

    def on_finished(self, request, end):
        raise ZeroDivisionError


class Notes:
    def __init__(self):
        self.calls = []

    def on_added(self, request):
        self.calls.append(("added", request))

    def on_step(self, core_index, stats, tokens):
        self.calls.append(("step", core_index, stats, tokens))

    def on_finished(self, request, end):
        self.calls.append(("finished", request, end))


def test_an_error_is_logged_once_and_stops_nothing(caplog):
    notes = Notes()
    observers = Observers(Broken(), notes)
    request, end = WatchedRequest("r", 3, SamplingParams()), RequestEnd(["stop"], RequestMetrics(0.0))
    stats, tokens = EngineStats(), StepTokens()
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            observers.on_added(request)
            observers.on_step(1, stats, tokens)
            observers.on_finished(request, end)
    assert notes.calls == 3 * [("added", request), ("step", 1, stats, tokens), ("finished", request, end)]
    (record,) = caplog.records
    assert "Broken" in record.getMessage() and record.exc_info


def test_each_that_fails_is_logged(caplog):
    observers = Observers(Broken())
    observers.add(Broken())
    observers.on_step(0, EngineStats(), StepTokens())
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "reasons, whole",
    [
        (["stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "abort", "stop"], "abort"),
        (["error", "abort"], "error"),
        ([], "refused"),
    ],
)
def test_the_worst_sample_tells_how_a_request_ended(reasons, whole):
    assert RequestEnd(reasons, RequestMetrics(0.0)).reason == whole
