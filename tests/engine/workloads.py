"""Requests of every kind, when they come and go, and what answers are right: those of each request run alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.core.step import TokenLogprobs
from jaxpaged.engine.engine import Engine
from tests.engine.tiny import MAX_LEN, VOCAB, Answer

EOS = (3, 77, 150)
LOGPROB_TOLERANCE = 1e-4  # of log-probabilities
MAX_STEPS = 5000

Answers = dict[tuple[str, int], Answer]


class TableGrammar:
    """A random automaton: in each of a few states some tokens may follow, and each leads to another state."""

    STATES = 5

    def __init__(self, seed: int, length: int):
        rng = np.random.default_rng(seed)
        allowed = rng.random((self.STATES, 32 * -(-VOCAB // 32))) < 0.3
        allowed[:, VOCAB:] = False
        self._allowed, self._next = allowed, rng.integers(0, self.STATES, VOCAB)
        self._state, self._left, self.error = 0, length, ""

    @property
    def finished(self) -> bool:
        return self._left == 0

    def accept(self, token_id: int) -> bool:
        if self.finished or not self._allowed[self._state, token_id]:
            self.error = f"{token_id} cannot follow"
            return False
        self._state, self._left = (self._state + self._next[token_id]) % self.STATES, self._left - 1
        return True

    def fill(self, mask: Any) -> None:
        assert not self.finished
        mask[:] = np.packbits(self._allowed[self._state], bitorder="little").view("<i4")

    def copy(self) -> TableGrammar:
        other = object.__new__(TableGrammar)
        other.__dict__.update(self.__dict__)
        return other


@dataclasses.dataclass(frozen=True)
class Job:
    """A request, and when it comes and goes.

    Attributes:
      arrival: before which step it comes.
      abort: after how many more steps it is aborted, if it still runs.
      grammar: seed and length of a `TableGrammar`.
      pooling: what vector it wants in place of tokens.
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    abort: int | None = None
    salt: str | None = None
    priority: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[int, int] | None = None
    pooling: str | None = None

    def request(self, engine: Engine) -> Request:
        params = self.params  # with a text for what the engine gets in tokens only
        if self.bad_word_ids:
            params = replace(params, bad_words=["word"])
        if self.grammar:
            params = replace(params, structured_outputs=StructuredOutputs(choice=["what the table says"]))
        return engine.make_request(
            self.name,
            list(self.prompt),
            params,
            cache_salt=self.salt,
            priority=self.priority,
            bad_word_ids=self.bad_word_ids,
            grammar=TableGrammar(*self.grammar) if self.grammar else None,
            pooling=PoolingParams(pooling=self.pooling) if self.pooling else None,
            arrival_time=float(self.arrival),
        )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Options of `make_engine`: what must not change any answer."""

    blocks: int = 64
    tokens: int = 64
    seqs: int = 8
    overlap: bool = True
    max_steps: int = 1
    caching: bool = True
    swap_blocks: int = 0
    policy: str = "fcfs"
    largest_buckets: bool = False


@dataclasses.dataclass(frozen=True)
class Workload:
    setting: Setting
    jobs: tuple[Job, ...]


def play(engine: Engine, jobs: tuple[Job, ...]) -> Answers:
    """Runs the jobs to their end; the books agree after every step, and nothing is left behind."""
    answers: Answers = {}
    coming = sorted(jobs, key=lambda job: job.arrival)
    leaving = sorted((job.arrival + job.abort, job.name) for job in jobs if job.abort is not None)

    def take(updates) -> None:
        for update in updates:
            answers.setdefault((update.request_id, update.index), Answer()).take(update)
        engine.scheduler.check_invariants()

    for step in itertools.count():
        while coming and coming[0].arrival <= step:
            engine.add_request(coming.pop(0).request(engine))
        while leaving and leaving[0][0] <= step:
            take(engine.abort(leaving.pop(0)[1]))
        if engine.has_work:
            take(engine.step())
        elif not coming:
            break
        assert step < MAX_STEPS, "no progress"
    assert engine.scheduler.block_manager.num_used_blocks == 0, "blocks are lost"
    assert all(answer.finish_reason for answer in answers.values()), "a sample has no end"
    return answers


def complaints(job: Job, answers: Answers, alone: Answers) -> list[str]:
    """How the answers to a job differ from those to the same job run alone."""
    found = []
    got, right = ({index: a for (name, index), a in some.items() if name == job.name} for some in (answers, alone))
    if got.keys() - right.keys() or (job.abort is None and got.keys() != right.keys()):
        return [f"{job.name}: samples {sorted(got)}, not {sorted(right)}"]
    for index, answer in sorted(got.items()):
        if job.params.use_beam_search and (answer.finish_reason == "abort" or _as_likely(answer, right[index])):
            continue  # what had been found when it was aborted depends on the step
        found += [f"{job.name}[{index}]: {text}" for text in _differences(answer, right[index])]
    return found


def _as_likely(answer: Answer, right: Answer) -> bool:
    """Whether two sequences are found in each other's place because only rounding tells which is likelier."""
    if answer.token_ids == right.token_ids or len(answer.token_ids) != len(right.token_ids):
        return False
    assert len(answer.logprobs) == len(right.logprobs) == len(right.token_ids), "nothing tells how likely they are"
    totals = [sum(record.logprob for record in a.logprobs) for a in (answer, right)]
    return abs(totals[0] - totals[1]) < LOGPROB_TOLERANCE


def _differences(answer: Answer, right: Answer) -> list[str]:
    found = []
    cut = answer.finish_reason == "abort"  # then all of it is a beginning
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        got, expected = getattr(answer, name), getattr(right, name)
        expected = expected[: len(got)] if cut else expected
        same = got == expected if name == "token_ids" else len(got) == len(expected) and all(map(_alike, got, expected))
        if not same:
            found.append(f"{name} {got}, not {expected}")
    if not cut and not np.allclose(answer.embedding, right.embedding, rtol=0, atol=1e-5):
        found.append(f"embedding {answer.embedding}, not {right.embedding}")
    ends = [(a.finish_reason, a.stop_reason) for a in (answer, right)]
    if ends[0] != ends[1] and not cut:
        found.append(f"ends {ends[0]}, not {ends[1]}")
    return found


def _alike(record: TokenLogprobs, right: TokenLogprobs) -> bool:
    """Equal but for rounding, which may also exchange neighbours that are nearly equal."""
    if (record.token_id, len(record.top_ids)) != (right.token_id, len(right.top_ids)):
        return False
    numbers = [[r.logprob, *r.top_logprobs] for r in (record, right)]
    ranks = [[r.rank, *(r.top_ranks or ())] for r in (record, right)]
    return (
        np.allclose(*numbers, rtol=0, atol=LOGPROB_TOLERANCE)
        and len(ranks[0]) == len(ranks[1])
        and np.abs(np.subtract(*ranks)).max() <= 1
        and (record.top_ids == right.top_ids or _nearly_equal(right.top_logprobs))
    )


def _nearly_equal(logprobs: list[float]) -> bool:
    """Whether two of them are: then these may have changed places. The last may have with one that is not there."""
    finite = [x for x in logprobs if x > -np.inf]
    return len(finite) < len(logprobs) or bool(np.any(-np.diff(finite) < 2 * LOGPROB_TOLERANCE))


def faults(job: Job, answers: Answers) -> list[str]:
    """Where the answers to a job are not what it asked for."""
    found = []
    for (name, index), answer in sorted(answers.items()):
        if name == job.name:
            broken = [rule for rule, kept in _rules(job, index, answer).items() if not kept]
            found += [f"{name}[{index}]: not {rule}: {answer}" for rule in broken]
    return found


def _rules(job: Job, index: int, answer: Answer) -> dict[str, bool]:
    params, tokens = job.params, answer.token_ids
    whole = answer.finish_reason in ("stop", "length")
    ending = {*(() if params.ignore_eos else EOS), *(params.stop_token_ids or ())}
    prompt_length = len(job.prompt[-(params.truncate_prompt_tokens or 0) :])
    longest = min(params.max_tokens, MAX_LEN - prompt_length)
    allowed = range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
    k = len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs
    rules = {
        "as short as max_tokens says": len(tokens) <= longest,
        "at max_tokens": answer.finish_reason != "length" or len(tokens) == longest,
        "from allowed_token_ids": all(token in allowed for token in tokens),
        "without bad words": not any(_holds(tokens, word) for word in job.bad_word_ids),
        "without an end before the end": not any(token in ending for token in tokens[:-1]),
        "min_tokens before the end": not any(token in ending for token in tokens[: params.min_tokens]),
        "with its log-probabilities": k is None or [r.token_id for r in answer.logprobs] == tokens,
        "with as many as asked for": k is None or all(len(r.top_ids) == k for r in answer.logprobs),
        "its prompt's log-probabilities": not whole
        or len(answer.prompt_logprobs)
        == (prompt_length - 1 if index == 0 and params.prompt_logprobs is not None else 0),
    }
    if job.grammar:
        grammar = TableGrammar(*job.grammar)
        rules["what the grammar says"] = all(map(grammar.accept, tokens))
    return rules


def _holds(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens) - len(word) + 1))


# --- features ----------------------------------------------------------------------------------------------------


class Draw:
    """Random choices as the tables below make them."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both possible."""
        return int(self.rng.integers(low, high + 1))

    def real(self, low: float, high: float) -> float:
        return round(float(self.rng.uniform(low, high)), 3)

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def ids(self, count: int) -> list[int]:
        """Distinct token ids."""
        return self.rng.choice(VOCAB, count, replace=False).tolist()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, VOCAB, count).tolist())


def _penalties(draw: Draw) -> dict[str, Any]:
    return {
        "presence_penalty": draw.pick(0.0, 2.0, draw.real(-2, 2)),
        "frequency_penalty": draw.pick(0.0, 1.5, draw.real(-2, 2)),
        "repetition_penalty": draw.pick(1.0, 1.3, draw.real(0.5, 2)),
    }


# What a feature sets: fields of SamplingParams, and of Job where it is none of these.
FEATURES: Mapping[str, Callable[[Draw], dict[str, Any]]] = {
    "penalties": _penalties,
    "logit_bias": lambda d: {"logit_bias": {t: d.real(-100, 20) for t in d.ids(d.integer(1, 40))}},
    "min_tokens": lambda d: {"min_tokens": d.integer(1, 6)},
    "bad_words": lambda d: {"bad_word_ids": tuple(d.tokens(d.pick(1, 1, 1, 2)) for _ in range(d.integer(1, 90)))},
    "allowed_ids": lambda d: {"allowed_token_ids": d.ids(d.integer(40, 200))},
    "grammar": lambda d: {"grammar": (d.integer(0, 999), d.integer(1, 14))},
    "logprobs": lambda d: {
        "logprobs": d.integer(0, 8),
        "logprobs_mode": d.pick(None, "raw_logprobs", "processed_logprobs"),
    },
    "prompt_logprobs": lambda d: {"prompt_logprobs": d.integer(0, 8)},
    "logprob_token_ids": lambda d: {"logprobs": 1, "logprob_token_ids": d.ids(d.integer(1, 20))},
    "scoring": lambda d: {"prompt_logprobs": d.integer(0, 3), "max_tokens": 0},
    "n": lambda d: {"n": d.integer(2, 4)},
    "best_of": lambda d: {"best_of": 4},
    "seed": lambda d: {"seed": d.integer(-(2**63), 2**63 - 1), "temperature": d.real(0.5, 1.5)},
    "stop_ids": lambda d: {"stop_token_ids": d.ids(d.integer(1, 40))},
    "truncation": lambda d: {"truncate_prompt_tokens": d.integer(1, 40)},
    "processors": lambda d: {"logits_processors": {"shift": {"by": d.real(-5, 5)}}},
    "priority": lambda d: {"priority": d.integer(-3, 3)},
    "beam_search": lambda d: {
        "use_beam_search": True,
        "beam_width": 4,
        "n": d.integer(1, 4),
        "early_stopping": d.pick(True, False, "never"),
        "length_penalty": d.pick(0.0, 1.0, d.real(-1, 2)),
    },
}

_JOB_FIELDS = {field.name for field in dataclasses.fields(Job)}
NOT_WITH_BEAMS = ("grammar", "logprob_token_ids", "scoring")  # refused


def compatible(features: tuple[str, ...]) -> bool:
    return "beam_search" not in features or not any(name in features for name in NOT_WITH_BEAMS)


def make_job(name: str, draw: Draw, features: tuple[str, ...], *, prompt: tuple[int, ...], **fields: Any) -> Job:
    """A job with these features, each drawn; what they leave open is drawn too."""
    beams = "beam_search" in features
    options: dict[str, Any] = {
        "temperature": draw.pick(0.0, 0.0, 0.7, 1.3),
        "seed": draw.integer(0, 99),
        "max_tokens": draw.pick(draw.integer(1, 16), draw.integer(1, 16), 36),
        "ignore_eos": draw.chance(0.2),
    }
    if not beams and options["temperature"]:
        options |= {"top_k": draw.pick(0, 20), "top_p": draw.pick(1.0, 0.9), "min_p": draw.pick(0.0, 0.05)}
    for feature in features:
        options |= FEATURES[feature](draw)
    if beams:
        options |= {"temperature": 0.0, "logprobs_mode": None}
        options.setdefault("logprobs", 0)  # by which equally likely sequences are told
    if options.get("min_tokens", 0) > options["max_tokens"]:
        options["max_tokens"] = options["min_tokens"] + 1
    of_job = {key: options.pop(key) for key in list(options) if key in _JOB_FIELDS}
    return Job(name=name, prompt=prompt, params=SamplingParams(**options), **(of_job | fields))


def draw_workload(seed: int, features: tuple[str, ...]) -> Workload:
    """A random engine and up to a dozen requests, of which many share the beginning of their prompts."""
    draw = Draw(seed)
    setting = Setting(
        blocks=draw.pick(64, 64, 24, 16),
        tokens=draw.pick(8, 16, 40, 64),
        seqs=draw.pick(8, 8, 3),
        overlap=draw.chance(0.7),
        max_steps=draw.pick(1, 2, 3, 8),
        caching=draw.chance(0.7),
        swap_blocks=draw.pick(0, 0, 6, 100),
        policy=draw.pick("fcfs", "priority", "spf"),
        largest_buckets=draw.chance(0.2),
    )
    stems = [draw.tokens(length) for length in (17, 48, 90)]
    jobs = []
    for i in range(draw.integer(2, 12)):
        stem = draw.pick(*stems, ())
        prompt = stem[: draw.integer(0, len(stem))] + draw.tokens(draw.integer(1, 20))
        chosen = tuple(name for name in features if draw.chance(0.2))
        if not compatible(chosen):
            chosen = tuple(name for name in chosen if name not in NOT_WITH_BEAMS)
        assert len(prompt) < MAX_LEN
        jobs.append(
            make_job(
                f"r{i}",
                draw,
                chosen,
                prompt=prompt,
                arrival=draw.pick(0, draw.integer(0, 30)),
                abort=draw.integer(0, 25) if draw.chance(0.15) else None,
                salt=draw.pick(None, None, "a"),
            )
        )
    for i in range(draw.pick(0, 0, 1, 3)):
        prompt = draw.pick(*stems)[: draw.integer(0, 90)] + draw.tokens(draw.integer(1, 20))
        pooling, arrival = draw.pick("last", "mean"), draw.integer(0, 30)
        jobs.append(Job(f"v{i}", prompt, SamplingParams(), arrival=arrival, pooling=pooling))
    return Workload(setting, tuple(jobs))
