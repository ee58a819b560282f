"""What an engine tells of itself."""

import time

import msgspec
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.stats import EngineStats
from tests.engine.tiny import GREEDY, VOCAB, run


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(31 * i + 7 * k) % VOCAB for k in range(length)] for i in range(count)]


def test_steps_tokens_and_padding(make_engine):
    engine = make_engine(overlap=False, caching=False)
    before = engine.stats
    assert (before.num_steps, before.num_prompt_tokens, before.num_padding_tokens) == (0, 0, 0)
    run(engine, prompts(3, 20), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    stats = engine.stats
    assert stats.num_prompt_tokens == 60 and stats.num_generated_tokens == 12
    assert stats.num_steps == 4  # the prompts together fit one
    # 60 tokens in a bucket of 64, then three times 3 tokens in one of 8.
    assert stats.num_padding_tokens == 4 + 3 * 5
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_compilations) == (0, 0, 0, 0)
    assert stats.num_programs == engine.num_programs > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_stages_of_the_last_step(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    engine.add_request(engine.make_request("r", [1, 2, 3], GREEDY))
    engine.step()
    if overlap:
        assert engine.stats.collect_seconds == engine.stats.update_seconds == 0.0  # there was nothing to collect
        engine.step()
    stats = engine.stats
    assert all(seconds > 0 for seconds in (stats.schedule_seconds, stats.launch_seconds, stats.collect_seconds))
    assert stats.update_seconds > 0 and stats.sample_seconds == 0.0  # no grammar
    engine.abort("r")


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_preempted_requests_compute_again_but_hit_nothing(make_engine, host_blocks):
    """B53: recompute after preemption is not a prefix-cache hit."""
    engine = make_engine(blocks=8, scheduling={"num_host_blocks": host_blocks})
    swapped = []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    run(engine, prompts(3, 20), params, each_step=lambda e: swapped.append(e.stats.num_swapped))
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_queries == 60 and stats.prefix_cache_hits == 0
    if host_blocks:
        assert max(swapped) > 0 and stats.num_prompt_tokens == 60
    else:
        assert max(swapped) == 0 and stats.num_prompt_tokens > 60
    assert stats.num_swapped == 0


@pytest.mark.parametrize("how", [{}, {"n": 2}, {"n": 2, "use_beam_search": True}], ids=lambda how: "-".join(how))
def test_time_in_the_queue_is_from_the_taking_in_to_the_first_admission(make_engine, how):
    """Not from the arrival: what comes before the engine is no time in its queue."""
    engine = make_engine(seqs=how.get("n", 1), caching=False)
    params, begin = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **how), time.monotonic()
    for name in ("a", "b"):
        engine.add_request(engine.make_request(name, [1, 2, 3], params, arrival_time=begin - 1000))
    times: dict[str, set[tuple[float, float]]] = {}
    while engine.has_work:
        for update in engine.step():
            times.setdefault(f"{update.request_id}{update.index}", set()).add(
                (update.queued_time, update.scheduled_time)
            )
    for found in times.values():
        ((queued, scheduled),) = found  # the same in every update
        assert begin <= queued <= scheduled
    (first,), (second,) = times["a0"], times["b0"]
    assert first < second


def test_it_crosses_to_another_process_whole():
    stats = EngineStats(num_running=3, num_blocks=64, num_used_blocks=16, schedule_seconds=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
    assert stats.kv_cache_usage == 0.25 and EngineStats().kv_cache_usage == 0.0
