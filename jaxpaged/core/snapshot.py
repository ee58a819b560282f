"""What an engine holds at one moment: who runs, who waits, and who owns which block. Never a token, never a text.

Each block has a number: `FREE`, `CACHED`, or `FIRST_OWNERS` + i if the requests `owners[i]` hold it: one as a rule,
several if they share a prefix. No two sets of owners are equal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
import numpy as np

from jaxpaged.core.request import Request, Status
from jaxpaged.core.scheduler import Scheduler

FREE, CACHED, FIRST_OWNERS = 0, 1, 2
MAX_WAITING = 100  # waiting requests that are told one by one; all are counted


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One sample of a request.

    Attributes:
      request_id, index: its name, and which of the request's samples it is.
      status: "running" (it has a slot and blocks) or "waiting".
      num_prompt_tokens, num_output_tokens: what is known of it on the host.
      num_computed_tokens: of these, how many have their keys and values in the pool, or soon will.
      num_cached_tokens: prompt tokens that it found there.
      max_total_tokens: where it ends at the latest.
      num_blocks: blocks in its table.
      num_preemptions: how often it lost them.
      age: seconds since it arrived.
    """

    request_id: str
    index: int
    status: Literal["running", "waiting"]
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    max_total_tokens: int
    num_blocks: int
    num_preemptions: int
    age: float


class EngineSnapshot(msgspec.Struct, frozen=True):
    """One engine core.

    Attributes:
      block_size: tokens in a block.
      num_blocks, num_used_blocks, num_cached_blocks: blocks of the pool; those that requests hold; those that nobody
        holds, but that can be found as a prefix.
      num_running, num_waiting: samples with a slot, and without.
      requests: the running ones in their order, then the first MAX_WAITING of those that wait for a slot or a prefix.
      owners: sets of indexes into `requests`, in ascending order.
      blocks: the numbers of blocks 1 to `num_blocks`, little-endian and unsigned, each of as few bytes as the largest
        needs.
    """

    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    requests: list[RequestSnapshot]
    owners: list[list[int]]
    blocks: bytes


def snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """The state of a scheduler, between two of its calls."""
    pool, now = scheduler.block_manager, time.monotonic()
    running, waiting = scheduler.running, scheduler.first_waiting(MAX_WAITING)
    owners, blocks = block_map(pool.num_blocks, [r.block_ids for r in running], pool.findable_blocks)
    return EngineSnapshot(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        num_used_blocks=pool.num_used_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        requests=[describe(request, now) for request in (*running, *waiting)],
        owners=owners,
        blocks=blocks,
    )


def describe(request: Request, now: float) -> RequestSnapshot:
    """What is told of a request; `now` as `time.monotonic` gives it."""
    return RequestSnapshot(
        request_id=request.request_id,
        index=request.index,
        status="running" if request.status is Status.RUNNING else "waiting",
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=min(request.num_computed_tokens, request.num_tokens),
        num_cached_tokens=max(0, request.num_cached_tokens),
        max_total_tokens=request.max_total_tokens,
        num_blocks=len(request.block_ids),
        num_preemptions=request.num_preemptions,
        age=round(max(0.0, now - request.arrival_time), 3),
    )


def block_map(
    num_blocks: int, tables: Sequence[Sequence[int]], findable: Collection[int] = ()
) -> tuple[list[list[int]], bytes]:
    """`owners` and `blocks` of a snapshot.

    Args:
      tables: the blocks of each request, in the order of `requests`.
      findable: blocks in the prefix cache; those in no table are CACHED.
    """
    sets = np.zeros(num_blocks + 1, np.int32)  # of each block, the place of its owners in `members`
    members: list[list[int]] = [[]]
    for index, table in enumerate(tables):
        mine = np.fromiter(table, np.int32, len(table))
        before = sets[mine]
        # Each set that had some of its blocks is split: these are of that set and of this request.
        kinds = np.flatnonzero(np.bincount(before, minlength=len(members)))
        split = np.zeros(len(members), np.int32)
        split[kinds] = np.arange(len(members), len(members) + len(kinds))
        sets[mine] = split[before]
        members += [[*members[kind], index] for kind in kinds.tolist()]
    held = np.bincount(sets, minlength=len(members)) > 0
    held[0] = False
    codes = np.where(held, np.cumsum(held) + (FIRST_OWNERS - 1), FREE)[sets]
    cached = np.fromiter(findable, np.int32, len(findable))
    codes[cached[codes[cached] == FREE]] = CACHED
    width = np.min_scalar_type(int(codes.max())).newbyteorder("<")
    return [members[i] for i in np.flatnonzero(held)], codes[1:].astype(width).tobytes()
