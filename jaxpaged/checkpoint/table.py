"""How a model's parameters are made from a checkpoint's tensors: plain data, one table per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]


def single(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor as it is."""
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True)
class Weight:
    """One parameter of the model.

    Attributes:
      path: where it lies in the params pytree, joined by "/": "layers_0/attn/qkv".
      sources: tensor names in the checkpoint (Hugging Face names), in the order `assemble` takes them.
      assemble: makes the parameter from the sources (fuse, reshape), which have its dtype already; must not copy when
        it need not.
    """

    path: str
    sources: tuple[str, ...]
    assemble: Assemble = single


@dataclass(frozen=True)
class CheckpointTable:
    """All weights of a model.

    Attributes:
      weights: one per leaf of the params pytree.
      ignored: regular expressions of checkpoint tensors that are rightly unused (buffers, tied heads).
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
