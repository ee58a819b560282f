"""The beams of one request: which requests compute them, and what becomes of them after each step."""

from __future__ import annotations

import math

import msgspec

from jaxpaged.core.beam_search import BeamSearch, Child
from jaxpaged.core.request import FAILURES, Ending, Request, Source, Status
from jaxpaged.core.residency import Residency
from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE, RequestUpdate, TokenLogprobs

_NOTHING = TokenLogprobs(NONE_ALLOWED, -math.inf, 1, [], [])  # of a beam that can go nowhere: it has no children


class BeamGroup:
    """A beam search under way.

    Each beam is a request like any other, but its next token is decided here, when all beams have been *heard*: until
    then that token counts as in flight. So a beam is never scheduled ahead of the decision; it may be preempted, or
    give up its place for a beam that has none, and then has nothing to do but wait. A beam that lives on in one child
    goes on as it is; for each child more there is a new request, which starts with its parent's blocks.

    Args:
      request: what the user asked for. It is itself never scheduled, and ends with the search.
      residency: who holds what.
    """

    def __init__(self, request: Request, residency: Residency):
        most = request.max_total_tokens - request.num_prompt_tokens
        self.request = request
        self._search = BeamSearch(request.params, max_tokens=most, eos_token_ids=request.eos_token_ids)
        self._residency = residency
        self._num_forks = 0
        self._beams = [self._first()]  # in the search's order
        self._heard: dict[Request, TokenLogprobs] = {}
        self._sampled: dict[Request, int] = {}  # the token that the device has put after each
        request.group = self
        residency.roster.enter(self._beams[0])
        residency.roster.queue(self._beams[0])

    def hear(self, beam: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> list[RequestUpdate]:
        """Takes in what a beam's row gave. Returns the request's last updates if the search ends with it."""
        if tokens[0] == NOT_FINITE:
            return self.end(FAILURES[NOT_FINITE])
        assert logprobs, "a beam's row without log-probabilities"
        self._heard[beam] = _NOTHING if tokens[0] == NONE_ALLOWED else logprobs[0]
        self._sampled[beam] = tokens[0]
        beam.num_inflight_tokens += 1  # sampled, but not decided
        if len(self._heard) < len(self._beams):
            return []
        children = self._search.advance([self._heard[b] for b in self._beams])
        if not children:
            return self.end(None)
        self._replace(children)
        self._heard.clear()
        self._sampled.clear()
        return []

    def end(self, ending: Ending | None) -> list[RequestUpdate]:
        """Ends the search. Returns the request's last updates: the best sequences so far, or none after an error.

        Args:
          ending: None if the search has come to its end.
        """
        for beam in self._beams:
            self._residency.end(beam, Ending("stop"))
        request = self.request
        request.status = Status.FINISHED
        request.num_cached_tokens = max(0, self._beams[0].num_cached_tokens)
        found = [] if ending and ending.finish_reason == "error" else self._search.results()
        updates = []
        for index in range(request.params.n):
            tokens, logprobs = (found[index].token_ids, found[index].logprobs) if index < len(found) else ([], None)
            how = ending or Ending("error", f"there are only {len(found)} sequences")
            if ending is None and index < len(found) and (reason := found[index].finish_reason):
                how = Ending(reason, found[index].stop_reason)
            cached, times = request.num_cached_tokens, (request.queued_time, self._beams[0].scheduled_time)
            updates.append(RequestUpdate(request.request_id, tokens, logprobs, *how, cached, index, *times))
        request.finish_reason, request.stop_reason = updates[0].finish_reason, updates[0].stop_reason
        return updates

    def can_yield(self, beam: Request) -> bool:
        """Whether a running beam has been heard, and waits for another one that does not run."""
        return beam in self._heard and any(b.status is Status.WAITING and b not in self._heard for b in self._beams)

    def _first(self) -> Request:
        first = self.request.fork(0)
        first.num_prompt_logprobs = 0
        first.is_plain, first.group = False, self
        first.max_total_tokens = first.num_tokens + 1
        first.params = msgspec.structs.replace(
            first.params,
            use_beam_search=False,
            n=1,
            best_of=None,
            beam_width=None,
            length_penalty=1.0,
            early_stopping=False,
            temperature=0.0,
            logprobs=self._search.num_candidates,
            logprobs_mode="processed_logprobs",
        )
        return first

    def _replace(self, children: list[Child]) -> None:
        """The beams' children take their place."""
        parents, roster = self._beams, self._residency.roster
        self._beams = []
        for child in children:
            parent = parents[child.parent]
            self._beams.append(self._fork(parent) if parent in self._beams else parent)
        for parent in parents:
            if parent not in self._beams:
                self._residency.end(parent, Ending("stop"))
        for beam, child in zip(self._beams, children, strict=True):
            beam.num_inflight_tokens = 0
            beam.all_token_ids.append(child.token)
            beam.max_total_tokens = beam.num_tokens + 1  # it is not scheduled beyond what is decided
            if beam.status is not Status.RUNNING:
                roster.queue(beam)
            elif self._sampled[beam] != child.token:
                self._residency.stale.append(beam)

    def _fork(self, parent: Request) -> Request:
        self._num_forks += 1
        beam = parent.fork(self._num_forks)
        if parent.status is Status.RUNNING:  # else it has no blocks, or will get them only with a later step
            beam.source = Source(parent, parent.num_preemptions)
        self._residency.roster.enter(beam)
        return beam
