"""Beam search: which beams live on, which have ended, and when to stop. Tokens and numbers only; no blocks, no device.

The definition is that of Hugging Face transformers 5 (`GenerationMixin._beam_search`), so that users get the sequences
they know. In a step all continuations of all beams are ranked by cumulative log-probability:

- the best `width` that do not end live on;
- those among the best `width` of all that end become hypotheses, of which the `width` best by score are kept; the
  score is logprob / length ** length_penalty, and a token that ends counts in both. Lesser ones that end are dropped.

Once `width` hypotheses are kept, the search is over if `early_stopping` is True, or if the best live beam could not
beat the worst of them: at its present length (False), or at the length best for it ("never"). At `max_tokens` every
beam ends. Equal log-probabilities are ranked by beam, then by token id.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from jaxpaged.core.sampling_params import ALL_LOGPROBS, SamplingParams
from jaxpaged.core.step import TokenLogprobs


class Child(NamedTuple):
    """A beam that lives on: `parent` is its beam's place in the last `live`, `logprob` is cumulative."""

    parent: int
    token: int
    logprob: float


_Ranked = tuple[float, int, int, int]
"""A continuation: minus its cumulative log-probability, its beam, its token, and the rank that it has there."""


class Hypothesis(NamedTuple):
    """A sequence that was found.

    Attributes:
      logprobs: a record a token, if the request wants log-probabilities: of the distributions that were searched.
      finish_reason, stop_reason: as a request's; None if the search was cut short while it lived.
    """

    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: str | None
    stop_reason: int | None
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class _Beam:
    """The last token of a sequence, and the beam that it continues."""

    parent: _Beam | None
    token: int
    logprob: float
    record: TokenLogprobs | None = None

    def path(self) -> list[_Beam]:
        """From the first token to this one."""
        beams, beam = [], self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


@dataclass(frozen=True, slots=True)
class _Ended:
    beam: _Beam
    score: float
    finish_reason: str | None
    stop_reason: int | None = None


class BeamSearch:
    """One request's search.

    Args:
      params: the request's.
      max_tokens: most tokens of a sequence; at least 1.
      eos_token_ids: ids that end a sequence, besides `params.stop_token_ids`; empty with `ignore_eos`.

    Attributes:
      width: most live beams, and most hypotheses.
      num_candidates: best continuations of each beam that `advance` needs, so that `width` of them do not end, and
        that `params.logprobs` asks for; -1 or more than the vocabulary holds: all.
      length: tokens of each live beam.
      live: cumulative log-probabilities of the live beams, best first; at the start one empty beam.
    """

    def __init__(self, params: SamplingParams, *, max_tokens: int, eos_token_ids: Collection[int] = ()):
        assert max_tokens >= 1, max_tokens
        self.params, self.max_tokens = params, max_tokens
        self.width = params.num_beams
        self.length = 0
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stops = frozenset(params.stop_token_ids or ())
        told = params.logprobs or 0
        self._enough = self.width + len(self._eos | self._stops)
        self.num_candidates = told if told == ALL_LOGPROBS else max(self._enough, told)
        self._live = [_Beam(None, -1, 0.0)]
        self._ended: list[_Ended] = []  # at most `width`, best first

    @property
    def live(self) -> list[float]:
        return [beam.logprob for beam in self._live]

    @property
    def finished(self) -> bool:
        """Whether nothing better is to be found."""
        if not self._live:
            return True
        if len(self._ended) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        grows = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self._score(self._live[0].logprob, self.max_tokens if grows else self.length)
        return best <= self._ended[-1].score

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[Child]:
        """Makes one step.

        Args:
          candidates: for each live beam, in order, its next token's distribution: of `top_ids` and `top_logprobs` the
            first `num_candidates` or more; with fewer, fewer beams may live on. No more of the record is looked at.

        Returns:
          The live beams from now on; none if the search is finished.
        """
        assert not self.finished and len(candidates) == len(self._live), (len(candidates), len(self._live))
        parents, self._live = self._live, []
        self.length += 1
        children: list[Child] = []
        ended: list[_Ended] = []
        for place, (cost, parent, token, rank) in enumerate(self._ranked(parents, candidates)):
            if place >= self.width and len(children) == self.width:
                break
            if (ending := self._ending(token)) is not None and place >= self.width:
                continue
            beam = _Beam(parents[parent], token, -cost, self._record(token, rank, candidates[parent]))
            if ending is None:
                children.append(Child(parent, token, -cost))
                self._live.append(beam)
            else:
                ended.append(_Ended(beam, self._score(-cost, self.length), *ending))
        # The sort is stable: of equals the earlier found is kept.
        self._ended = sorted(self._ended + ended, key=lambda e: -e.score)[: self.width]
        if self.finished:
            self._live, children = [], []
        return children

    def results(self) -> list[Hypothesis]:
        """The `n` best sequences, best first; if fewer have ended, then the best live ones after them.

        They are fewer than `n` where not that many exist.
        """
        found = list(self._ended)
        if self.length:
            found += [_Ended(beam, self._score(beam.logprob, self.length), None) for beam in self._live]
        return [self._hypothesis(ended) for ended in found[: self.params.n]]

    def _ranked(self, parents: Sequence[_Beam], candidates: Sequence[TokenLogprobs]) -> Iterator[_Ranked]:
        """All continuations, the likeliest first. Few of them are ever looked at, so the rows are merged on demand."""
        rows = (self._row(i, beam, row) for i, (beam, row) in enumerate(zip(parents, candidates, strict=True)))
        return heapq.merge(*rows)

    def _row(self, index: int, parent: _Beam, row: TokenLogprobs) -> Iterator[_Ranked]:
        """The continuations of one beam, which come best first but for the order of equals."""
        early = self.length <= self.params.min_tokens  # that many come before one that ends
        equals: list[_Ranked] = []
        best = zip(row.top_ids, row.top_logprobs, strict=True)
        for rank, (token, logprob) in enumerate(islice(best, self._enough), 1):
            # What may not be produced has no probability; what would end it too early may not.
            if not logprob > -math.inf or (early and (token in self._eos or token in self._stops)):
                continue
            cost = -(parent.logprob + logprob)
            if equals and cost != equals[0][0]:
                yield from sorted(equals)
                equals.clear()
            equals.append((cost, index, token, rank))
        yield from sorted(equals)

    def _ending(self, token: int) -> tuple[str, int | None] | None:
        """Finish and stop reason if a sequence ends with this token."""
        if token in self._eos:
            return "stop", None
        if token in self._stops:
            return "stop", token
        return ("length", None) if self.length >= self.max_tokens else None

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def _record(self, token: int, rank: int, row: TokenLogprobs) -> TokenLogprobs | None:
        k = self.params.logprobs
        if k is None:
            return None
        k = len(row.top_ids) if k < 0 else k
        return TokenLogprobs(token, row.top_logprobs[rank - 1], rank, row.top_ids[:k], row.top_logprobs[:k])

    def _hypothesis(self, ended: _Ended) -> Hypothesis:
        path = ended.beam.path()
        records = [beam.record for beam in path if beam.record is not None]
        return Hypothesis(
            [beam.token for beam in path],
            ended.beam.logprob,
            ended.score,
            ended.finish_reason,
            ended.stop_reason,
            records if self.params.logprobs is not None else None,
        )
