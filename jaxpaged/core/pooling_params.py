"""How a prompt becomes one vector."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from jaxpaged.core.parameter_checks import boolean, integer, one_of

PoolingKind = Literal["last", "mean"]
POOLING_KINDS = ("last", "mean")

_INT32 = 2**31 - 1


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an embedding is made of: hidden states after the model's final norm.

    Attributes:
      pooling: "last" takes the last prompt token's, "mean" the mean over all prompt tokens. None: as the model says.
      normalize: scale to unit L2 norm.
      dimensions: keep the first so many, before the scaling; None: all.
    """

    pooling: PoolingKind | None = None
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            one_of(*POOLING_KINDS)("pooling", self.pooling)
        boolean("normalize", self.normalize)
        if self.dimensions is not None:
            integer(1, _INT32)("dimensions", self.dimensions)

    def first_position(self, num_prompt_tokens: int) -> int:
        """The first prompt position whose hidden state is needed; all after it are too."""
        assert self.pooling is not None, "not resolved"
        return 0 if self.pooling == "mean" else num_prompt_tokens - 1

    def vector(self, total: np.ndarray, count: int) -> np.ndarray:
        """The embedding, float32, from the sum of `count` hidden states."""
        mean = np.asarray(total[: self.dimensions], np.float64) / count
        norm = float(np.linalg.norm(mean)) if self.normalize else 1.0
        return (mean / (norm or 1.0)).astype("<f4")
