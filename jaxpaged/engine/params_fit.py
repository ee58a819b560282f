"""Whether other weights can take the place of a model's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError


def check_fit(old: Any, new: Any) -> None:
    """Raises CheckpointError unless two pytrees of arrays agree in structure, shapes and dtypes."""
    ours, theirs = _described(old), _described(new)
    missing, unused = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    misshaped = [
        f"{name}: {theirs[name]} instead of {ours[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    if missing or unused or misshaped:
        raise CheckpointError("the params do not fit the model", missing=missing, unused=unused, misshaped=misshaped)
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise CheckpointError(f"the params do not fit the model: {jax.tree.structure(new)} is nested otherwise")


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{getattr(leaf, 'dtype', type(leaf).__name__)}"
        f"{list(np.shape(leaf))}"
        for path, leaf in leaves
    }
