"""What engines are compared at: requests that come at once, and how long they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WRITTEN = re.compile(r"(\d+)x(?:(\d+):)?(\d+)\+(\d+)")
_ROUND = 128  # tokens in a block of vLLM for CPU; nobody's are larger


@dataclass(frozen=True)
class Job:
    """Requests that come at once, written REQUESTSxIN+OUT, as `32x128+128`.

    `32x1024:64+128`: the prompts share their first 1,024 tokens, and 64 more are each one's own.
    """

    num_prompts: int
    shared_len: int
    own_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> Job:
        """Raises ValueError if `text` is not a job as written above."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a job: REQUESTSxIN+OUT, or REQUESTSxSHARED:OWN+OUT")
        job = cls(*(int(number or 0) for number in match.groups()))
        if not (job.num_prompts and job.own_len and job.output_len):
            raise ValueError(f"{text!r}: requests, tokens in and tokens out must be at least 1")
        return job

    def __str__(self) -> str:
        shared = f"{self.shared_len}:" if self.shared_len else ""
        return f"{self.num_prompts}x{shared}{self.own_len}+{self.output_len}"

    @property
    def title(self) -> str:
        """For the head of a column."""
        shared = f"{self.shared_len} shared + " if self.shared_len else ""
        plural = "" if self.num_prompts == 1 else "s"
        return f"{self.num_prompts} request{plural}, {shared}{self.own_len} in, {self.output_len} out"

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.shared_len + self.own_len + self.output_len

    def work(self, seed: int | str) -> dict[str, Any]:
        """As `peer_worker` takes it. Its prompts begin like those of no other job and no other seed."""
        return {
            "num_prompts": self.num_prompts,
            "shared_len": self.shared_len,
            "own_len": self.own_len,
            "output_len": self.output_len,
            "seed": f"{self}, {seed}",
        }


def limits(jobs: Sequence[Job]) -> dict[str, int]:
    """What an engine must have room for to run any of the jobs: requests, tokens of one, tokens in the KV cache."""
    blocks = max(job.num_prompts * -(-job.length // _ROUND) for job in jobs)
    return {
        "max_prompts": max(job.num_prompts for job in jobs),
        "max_len": max(job.length for job in jobs),
        "kv_tokens": (blocks + blocks // 16 + 1) * _ROUND,  # a little room: nobody should have to evict or preempt
    }
