"""Random requests on random engines: each gets the answer that it gets alone (float32, CPU).

A failure names its seed; `WORKLOADS=<seed> python -m pytest tests/engine/test_differential.py` plays it again, and
`WORKLOADS=1000:2000` plays others.
"""

import os

import pytest

from tests.engine.workloads import FEATURES, complaints, draw_workload, faults, play

FAST, ALL = 40, 300


def _seeds():
    chosen = os.environ.get("WORKLOADS")
    if chosen:
        first, _, end = chosen.partition(":")
        return range(int(first), int(end) if end else int(first) + 1)
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= FAST else ()) for seed in range(ALL)]


@pytest.mark.parametrize("seed", _seeds())
def test_each_request_is_answered_as_if_alone(seed, make_setting, solo_job):
    workload = draw_workload(seed, tuple(FEATURES))
    answers = play(make_setting(workload.setting), workload.jobs)
    wrong = [text for job in workload.jobs for text in complaints(job, answers, solo_job(job)) + faults(job, answers)]
    assert not wrong, "\n".join([f"WORKLOADS={seed}: {workload.setting}", *wrong])
