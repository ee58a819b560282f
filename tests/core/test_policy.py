import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.config import EngineConfig
from jaxpaged.core.policy import policy_key
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.errors import ConfigError

FCFS = EngineConfig()
PRIORITY = EngineConfig(scheduling_policy="priority", ageing=10)
SPF = EngineConfig(scheduling_policy="spf", ageing=10)
PURE = [dataclasses.replace(config, ageing=0) for config in (PRIORITY, SPF)]

times = st.floats(0, 1e7)
priorities = st.integers(-(2**31), 2**31 - 1)
lengths = st.integers(1, 5000)


def request(arrival=0.0, *, priority=0, length=1, name="r"):
    return Request(name, [0] * length, SamplingParams(), max_model_len=8192, priority=priority, arrival_time=arrival)


def order(config, *requests):
    return [r.request_id for r in sorted(requests, key=policy_key(config))]


def test_first_come_first_served():
    late, early = request(2.0, priority=-5, name="late"), request(1.0, length=900, name="early")
    assert order(FCFS, late, early) == ["early", "late"]


@pytest.mark.parametrize(
    ("waited", "first"), [(0.0, "urgent"), (29.9, "urgent"), (30.1, "patient"), (1000.0, "patient")]
)
def test_waiting_makes_up_for_priority(waited, first):
    patient, urgent = request(5.0, priority=3, name="patient"), request(5.0 + waited, name="urgent")
    assert order(PRIORITY, patient, urgent)[0] == first
    assert order(PURE[0], patient, urgent)[0] == "urgent"


@pytest.mark.parametrize(("waited", "first"), [(0.0, "short"), (19.9, "short"), (20.1, "long"), (1000.0, "long")])
def test_waiting_makes_up_for_length(waited, first):
    long, short = request(5.0, length=2100, name="long"), request(5.0 + waited, length=100, name="short")
    assert order(SPF, long, short)[0] == first
    assert order(PURE[1], long, short)[0] == "short"


@given(times, times, priorities, lengths, st.floats(0, 1e9))
def test_equals_are_served_in_order_of_arrival(one, other, priority, length, ageing):
    for config in (FCFS, PRIORITY, SPF):
        key = policy_key(dataclasses.replace(config, ageing=ageing))
        a, b = (request(t, priority=priority, length=length) for t in (one, other))
        assert (key(a) < key(b)) == (one < other)


@given(st.lists(st.tuples(times, priorities), min_size=1, max_size=20))
def test_without_ageing_priority_alone_decides(drawn):
    requests = [request(t, priority=p) for t, p in drawn]
    sorted_ = sorted(requests, key=policy_key(PURE[0]))
    assert [(r.priority, r.arrival_time) for r in sorted_] == sorted((p, t) for t, p in drawn)


@given(times, st.integers(-1000, 1000), st.floats(1e-3, 1e4), st.integers(-1000, 1000), lengths, lengths)
def test_nobody_is_overtaken_forever(arrival, priority, ageing, other, length, other_length):
    """Whoever comes later than ageing * (difference) goes later, whatever it is."""
    for config, cost, other_cost in (
        (PRIORITY, priority, other),
        (SPF, length / 1000, other_length / 1000),
    ):
        key = policy_key(dataclasses.replace(config, ageing=ageing))
        patience = ageing * max(0.0, cost - other_cost)
        late = arrival + patience * (1 + 1e-6) + 1e-3 + arrival * 1e-6
        kept = request(arrival, priority=priority, length=length)
        assert key(kept) < key(request(late, priority=other, length=other_length))


def test_a_flood_of_urgent_requests_lets_everybody_pass():
    """One request a second comes and one is served; the patient one is served within ageing * 5 seconds."""
    key = policy_key(PRIORITY)
    waiting = [request(0.0, priority=5, name="patient")]
    for second in range(100):
        waiting.append(request(float(second), name=str(second)))
        waiting.sort(key=key)
        if waiting.pop(0).request_id == "patient":
            break
    assert 45 <= second <= 51


def test_the_users_key_decides():
    config = EngineConfig(scheduling_policy="priority", scheduling_key=lambda r: -r.num_prompt_tokens)
    requests = [request(1.0, length=2, name="a"), request(2.0, length=9, name="b"), request(0.5, length=2, name="c")]
    assert order(config, *requests) == ["b", "c", "a"]
    for rank in (2, np.float32(2), np.int64(2), Fraction(2)):
        assert policy_key(EngineConfig(scheduling_key=lambda r, rank=rank: rank))(requests[0]) == (21.0, 1.0)


@pytest.mark.parametrize(("ageing", "waited", "first"), [(10, 29.9, "new"), (10, 30.1, "old"), (0, 1e6, "new")])
def test_waiting_makes_up_for_the_users_key(ageing, waited, first):
    config = EngineConfig(scheduling_key=lambda r: r.priority, ageing=ageing)
    old, new = request(5.0, priority=3, name="old"), request(5.0 + waited, name="new")
    assert order(config, old, new)[0] == first


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, None, "1", True, 1j, (1, 2)])
def test_a_key_that_is_no_finite_number_is_refused(value):
    def odd_key(request):
        return value

    with pytest.raises(ConfigError, match=r"odd_key.*'r7'"):
        policy_key(EngineConfig(scheduling_key=odd_key))(request(name="r7"))
