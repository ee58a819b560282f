"""What an engine has done and does, in numbers."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One engine core's counters, which only grow, and its state as of now.

    Attributes:
      num_running, num_waiting: samples that have a slot, and that wait for one.
      num_swapped: those of the waiting whose blocks are in host memory.
      num_preemptions: how often one lost its blocks, ever.
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, ever; each request counts once.
      num_used_blocks, num_cached_blocks, num_blocks: blocks that live requests hold; that nobody holds, but that can be
        found as a prefix; and all.
      num_programs: compiled programs.
      num_compilations: compilations since warm-up; stays 0.
      num_steps: steps launched, ever; of several that are one, those that were done count when they are.
      num_prompt_tokens: prompt tokens computed, ever; those of a preempted request count again.
      num_generated_tokens: tokens sampled, ever.
      num_padding_tokens: tokens that steps were padded with, ever.
      schedule_seconds, launch_seconds, sample_seconds, collect_seconds, update_seconds: how long the last step took
        to be laid out, to be started, to have its grammar masks applied, to be waited for, and to be taken in; 0.0
        of what it had no need of.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_blocks: int = 0
    num_programs: int = 0
    num_compilations: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_padding_tokens: int = 0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    sample_seconds: float = 0.0
    collect_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that live requests hold, from 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
