"""Counts and times an engine's steps."""

from __future__ import annotations

import time

from jaxpaged.core.step import Step, StepResult


class StepMeter:
    """Counts an engine's steps and times their stages: `start`, then `lap` at the end of each stage.

    Attributes:
      num_steps, num_prompt_tokens, num_generated_tokens, num_padding_tokens: as in EngineStats.
      seconds: of the stages of the present or last step, by name.
    """

    STAGES = ("schedule", "launch", "sample", "collect", "update")

    def __init__(self) -> None:
        self.num_steps = self.num_prompt_tokens = self.num_generated_tokens = self.num_padding_tokens = 0
        self.seconds: dict[str, float] = dict.fromkeys(self.STAGES, 0.0)
        self._since = 0.0

    def start(self) -> None:
        """A step begins."""
        self.seconds = dict.fromkeys(self.STAGES, 0.0)
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage is over, and the next one begins."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now

    def launched(self, step: Step) -> None:
        """Counts a step that has been started."""
        self.num_steps += 1
        self.num_prompt_tokens += step.num_prompt_tokens

    def collected(self, result: StepResult, num_padding_tokens: int) -> None:
        """Counts what came of a step, or of several that were one.

        Args:
          num_padding_tokens: of each.
        """
        self.num_steps += result.num_steps - 1
        self.num_padding_tokens += num_padding_tokens * result.num_steps
        self.num_generated_tokens += sum(map(len, result.token_ids))
