"""Functions of one row, applied to all rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def over_rows(
    function: Callable[..., Any], arrays: Any, own: tuple[Any, ...] = (), shared: tuple[Any, ...] = ()
) -> Any:
    """`function(*row, *branches)` of each row of `arrays`, results stacked.

    On CPU the rows go one after the other: each stays in the cache from its first operation to the last, skips what it
    does not ask for, and is computed by the same instructions in every batch. Elsewhere they go side by side, and skip
    what no row asks for.

    Args:
      arrays: with a leading [R].
      own: what the function branches on, with a leading [R], for rows that go alone.
      shared: the same for all rows together: what any of them asks for.
    """
    return jax.lax.platform_dependent(
        arrays,
        own,
        shared,
        cpu=lambda arrays, own, shared: jax.lax.map(lambda row: function(*row[0], *row[1]), (arrays, own)),
        default=lambda arrays, own, shared: jax.vmap(lambda *row: function(*row, *shared))(*arrays),
    )
