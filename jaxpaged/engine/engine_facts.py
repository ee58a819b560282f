"""What does not change about a warm engine: whoever makes requests for it must know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine_like import EngineLike


class EngineFacts(msgspec.Struct, frozen=True, array_like=True):
    """Attributes:
    config: its resolved options.
    vocab_size: prompts may hold ids below it.
    hidden_size: numbers of a whole embedding.
    eos_token_ids: ids that end a sequence unless a request ignores them.
    pooling: how the model makes an embedding; see `checkpoint.pooling`.
    num_programs: compiled programs.
    warm_programs, cold_programs: which those are, and which are compiled when they are first needed: kind -> sizes.
    """

    config: EngineConfig
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    pooling: str
    num_programs: int
    warm_programs: Mapping[str, Sequence[int]]
    cold_programs: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, engine: EngineLike) -> EngineFacts:
        """Those of an engine."""
        return cls(
            engine.config,
            engine.vocab_size,
            engine.hidden_size,
            tuple(engine.eos_token_ids),
            engine.pooling,
            engine.num_programs,
            engine.warm_programs,
            engine.cold_programs,
        )
