"""Several steps as one: the same rows, one token further each time, without a word from the host in between."""

from __future__ import annotations

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Status
from jaxpaged.core.step import Step


def stretch(step: Step, pool: BlockManager, max_steps: int) -> None:
    """Makes a step of single tokens go on, as far as lengths and free blocks allow.

    Args:
      step: of which every row samples, and nothing else is asked.
      max_steps: how many steps it may be at most. They are no more than a block has tokens, so that a row needs one new
        block at most.
    """
    more = min(max_steps, pool.block_size) - 1
    for request in step.requests:
        more = min(more, request.max_total_tokens - len(request.all_token_ids) - request.num_inflight_tokens)
    while more > 0 and _num_blocks_needed(step, pool, more) > pool.num_available_blocks:
        more -= 1
    if more <= 0:
        return
    step.num_steps += more
    for request in step.requests:
        request.num_inflight_tokens += more
        request.num_computed_tokens += more
        step.new_blocks += pool.cover(request, request.num_computed_tokens)


def settle(step: Step, pool: BlockManager, num_done: int) -> None:
    """Takes back what a step of several did not come to; of each row one token remains to be accounted for.

    Args:
      num_done: how many of its steps were done.
    """
    unused = step.num_steps - num_done
    for request in step.requests:
        if request.status is not Status.FINISHED:
            request.num_inflight_tokens -= step.num_steps - 1
            request.num_computed_tokens -= unused
            pool.trim(request)


def _num_blocks_needed(step: Step, pool: BlockManager, more: int) -> int:
    return sum(pool.blocks_for(r.num_computed_tokens + more) - len(r.block_ids) for r in step.requests)
