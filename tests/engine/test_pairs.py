"""S21: every pair of request features, and every feature under every condition of the engine, is answered as if alone.

A round of the table is one engine under some conditions, with a request for each of its pairs of features. The rounds
are those of a tournament: each feature meets every other once, and each plays in every round, so under each condition.

S21 names speculation and LoRA as well, which there are none of here: no round has them.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from jaxpaged.core.sampling_params import SamplingParams
from tests.engine.tiny import BLOCK
from tests.engine.workloads import FEATURES, Draw, Job, Setting, compatible, complaints, faults, make_job, play

# Condition -> what it may be; the first asks for nothing.
CONDITIONS = {
    "caching": (False, True),
    "chunked": (False, True),
    "pressure": ("none", "recompute", "swap"),
    "overlap": (False, True),
    "abort": (False, True),
    "largest_buckets": (False, True),
}


def tournament() -> list[list[tuple[str, ...]]]:
    """Rounds in which each feature meets another one, or nobody; all pairs meet once (the circle method)."""
    players: list[str | None] = list(FEATURES)
    players += [None] * (len(players) % 2)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([tuple(name for name in pair if name is not None) for pair in pairs])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def condition_rows(count: int) -> list[dict]:
    """`count` rows of conditions, each chosen to show as many new pairs of them as possible."""
    rng = np.random.default_rng(0)
    every = [dict(zip(CONDITIONS, values, strict=True)) for values in itertools.product(*CONDITIONS.values())]
    seen: set = set()
    rows = []
    for _ in range(count):
        rng.shuffle(every)
        rows.append(max(every, key=lambda row: len(_pairs(row.items()) - seen)))
        seen |= _pairs(rows[-1].items())
    return rows


def _pairs(items) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(items, 2)}


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
ROUNDS = tournament()
ROWS = condition_rows(len(ROUNDS))


def test_the_table_holds_every_pair():
    met = [frozenset(pair) for games in ROUNDS for pair in games if len(pair) == 2]
    assert len(met) == len(set(met)) and set(met) == _pairs(FEATURES)
    for games in ROUNDS:
        assert sorted(itertools.chain(*games)) == sorted(FEATURES)
    wanted = {
        frozenset([(one, a), (other, b)])
        for one, other in itertools.combinations(CONDITIONS, 2)
        for a, b in itertools.product(CONDITIONS[one], CONDITIONS[other])
    }
    assert set().union(*(_pairs(row.items()) for row in ROWS)) == wanted


def _setting(row: dict) -> Setting:
    return Setting(
        blocks=64 if row["pressure"] == "none" else 10,
        tokens=16 if row["chunked"] else 64,
        overlap=row["overlap"],
        caching=row["caching"],
        swap_blocks=64 if row["pressure"] == "swap" else 0,
        policy="priority",
        largest_buckets=row["largest_buckets"],
    )


def _jobs(number: int) -> list[Job]:
    draw = Draw(number)
    stem = draw.tokens(2 * BLOCK)
    jobs = []
    for pair in ROUNDS[number]:
        for features in [pair] if compatible(pair) else [(name,) for name in pair]:
            prompt = stem[: draw.pick(BLOCK, 2 * BLOCK)] + draw.tokens(draw.integer(1, 12))
            name = "+".join(features)
            job = make_job(name, draw, features, prompt=prompt, arrival=draw.integer(0, 3))
            if job.params.max_tokens:  # long enough to outgrow a small pool together
                job = dataclasses.replace(job, params=replace(job.params, max_tokens=30))
            jobs.append(job)
    return jobs


@pytest.mark.parametrize("number", range(len(ROUNDS)))
def test_pairs_of_features(number, make_setting, solo_job):
    row = ROWS[number]
    jobs = _jobs(number)
    if row["pressure"] != "none":  # two that go first and grow for long
        jobs += [Job(f"long{i}", Draw(i).tokens(10), LONG, priority=-9) for i in range(2)]
    if row["abort"]:
        jobs.append(dataclasses.replace(jobs[0], name="leaves", abort=5))
    engine = make_setting(_setting(row))
    answers = play(engine, tuple(jobs))
    wrong = [text for job in jobs for text in complaints(job, answers, solo_job(job)) + faults(job, answers)]
    assert not wrong, "\n".join([f"{row}", *wrong])
    assert engine.scheduler.num_preemptions or row["pressure"] == "none"
    assert any(answer.num_cached_tokens for answer in answers.values()) == row["caching"]
