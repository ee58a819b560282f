"""Functions of one row, applied to all rows of a batch, or to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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


def in_place_if(wanted: jax.Array, change: Callable[..., Any], x: Any, *others: Any) -> Any:
    """`change(x, *others)` if it is wanted, bool[], else `x`; pytrees.

    XLA copies what only one branch of `lax.cond` changes, but updates in place what a loop carries: so on accelerators
    it is a loop of one round or none. What `change` makes of `others` alone is made in the loop as well, not before it.
    """

    def loop(wanted: jax.Array, x: Any, others: tuple[Any, ...]) -> Any:
        def once(_: jax.Array, x: Any) -> Any:
            return change(*jax.lax.optimization_barrier((x, *others)))

        return jax.lax.fori_loop(0, wanted.astype(jnp.int32), once, x)

    return jax.lax.platform_dependent(
        wanted,
        x,
        others,
        cpu=lambda wanted, x, others: jax.lax.cond(wanted, change, lambda x, *_: x, x, *others),
        default=loop,
    )
