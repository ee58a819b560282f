"""Which programs an engine has compiled, for its operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jaxpaged.engine.engine_like import EngineLike


class Programs(msgspec.Struct, frozen=True, array_like=True):
    """Attributes:
    count: all that are compiled.
    warm, cold: which those are, and which are compiled when they are first needed: kind -> sizes.
    """

    count: int
    warm: Mapping[str, Sequence[int]]
    cold: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, engine: EngineLike) -> Programs:
        """Those of an engine, as of now. Called in the thread that steps."""
        return cls(engine.num_programs, engine.warm_programs, engine.cold_programs)
