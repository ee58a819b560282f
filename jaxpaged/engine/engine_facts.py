"""What does not change about an engine: whoever makes requests for it must know it."""

from __future__ import annotations

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
    """

    config: EngineConfig
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    pooling: str

    @classmethod
    def of(cls, engine: EngineLike) -> EngineFacts:
        """Those of an engine."""
        return cls(
            engine.config,
            engine.vocab_size,
            engine.hidden_size,
            tuple(engine.eos_token_ids),
            engine.pooling,
        )
