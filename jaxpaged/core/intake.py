"""What comes back from the device, handed to the requests."""

from __future__ import annotations

from jaxpaged.core.request import Request, Status
from jaxpaged.core.residency import Residency
from jaxpaged.core.step import NOT_FINITE, RequestUpdate, Step, StepResult, TokenLogprobs
from jaxpaged.core.stretch import settle


class Intake:
    """Appends tokens to requests, and ends those that are done.

    Args:
      residency: who holds what.
    """

    def __init__(self, residency: Residency):
        self._residency = residency

    def update(self, step: Step, result: StepResult) -> list[RequestUpdate]:
        """Takes in a step's result.

        A row may bring several tokens, if no later step holds its request; those after the first that ends the
        request are cut off. Rows of requests that ended meanwhile are dropped; a preempted one keeps its token.

        Returns:
          An update for each piece of prompt log-probabilities, then one for each vector, then one for each live request
          that got a token.
        """
        if step.num_steps > 1:
            settle(step, self._residency.block_manager, result.num_steps)
        updates = self._prompt_logprobs(step, result) if step.prompt_ranges else []
        if step.pooled:
            updates += self._vectors(step, result)
        finished = Status.FINISHED
        all_logprobs = result.logprobs or [None] * len(step.requests)
        for request, samples, tokens, logprobs in zip(
            step.requests, step.samples, result.token_ids, all_logprobs, strict=True
        ):
            if not samples or request.status is finished:
                continue
            request.num_inflight_tokens -= 1
            ids = request.all_token_ids
            if request.is_plain and len(tokens) == 1 and len(ids) + 1 < request.max_total_tokens:
                token = tokens[0]
                if token >= 0 and token not in request.eos_token_ids and token not in request.stop_token_ids:
                    ids.append(token)
                    updates.append(
                        RequestUpdate(
                            request.request_id,
                            tokens,
                            logprobs,
                            None,
                            None,
                            request.num_cached_tokens,
                            request.index,
                            request.queued_time,
                            request.scheduled_time,
                        )
                    )
                    continue
            updates += self._take(request, tokens, logprobs)
        return updates

    def _take(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> list[RequestUpdate]:
        """Takes in the row of any request, which may end it."""
        if request.group is not None:
            updates, bad = request.group.hear(request, tokens, logprobs), tokens[0] == NOT_FINITE
        else:
            assert len(tokens) <= 1 or not request.num_inflight_tokens, "a later step was laid out for one token"
            n, ending = request.extend(tokens)
            cached, queued = request.num_cached_tokens, request.queued_time
            update = RequestUpdate(
                request.request_id, tokens, logprobs, None, None, cached, request.index, queued, request.scheduled_time
            )
            if ending is not None:
                update = self._residency.end(request, ending)
                update.new_token_ids, update.logprobs = tokens[:n], logprobs and logprobs[:n]
            updates, bad = [update], n < len(tokens) and tokens[n] == NOT_FINITE
        if bad:
            self._residency.forget()  # its blocks may hold NaN too
        return updates

    def _vectors(self, step: Step, result: StepResult) -> list[RequestUpdate]:
        """Takes in sums of hidden states, with which some requests end."""
        updates = []
        for asked, total in zip(step.pooled, result.pooled, strict=True):
            request = step.requests[asked.row]
            if request.status is Status.FINISHED:
                continue
            ending, vector = request.pool(total, asked.end)
            if ending is None:
                continue
            request.num_inflight_tokens -= 1
            update = self._residency.end(request, ending)
            update.embedding = vector
            updates.append(update)
            if vector is None:
                self._residency.forget()  # its blocks may hold NaN too
        return updates

    @staticmethod
    def _prompt_logprobs(step: Step, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for asked, records in zip(step.prompt_ranges, result.prompt_logprobs, strict=True):
            request = step.requests[asked.row]
            if request.status is not Status.FINISHED:
                update = RequestUpdate(request.request_id, [], num_cached_tokens=request.num_cached_tokens)
                update.index, update.prompt_logprobs = request.index, records
                updates.append(update)
        return updates
