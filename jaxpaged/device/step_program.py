"""The one function that runs on the device each step; every bucket is a compilation of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpaged.device import batch as batches
from jaxpaged.device.batch import Batch
from jaxpaged.device.buckets import Bucket
from jaxpaged.device.sampling import Sampled, sample
from jaxpaged.device.slots import Slots
from jaxpaged.layers.attention import PagedContext
from jaxpaged.models.decoder import Decoder


@dataclass(frozen=True)
class StepOptions:
    """What is static in a step, besides its bucket.

    Attributes:
      page_size: tokens in a page.
      vocab_size: tokens that may be produced; the head may have more rows.
      max_logprobs: columns of top log-probabilities.
      implementation: attention kernels, by name; None: the platform's best.
      debug: the kernels check the integers that they are given.
      small_head: a mixed step in which at most this many rows sample runs the head on that many rows only;
        0: always on all rows. Worth a branch where the head's cost grows with its rows (CPU).
    """

    page_size: int
    vocab_size: int
    max_logprobs: int
    implementation: str | None
    debug: bool = False
    small_head: int = 0


StepFunction = Callable[[dict, jax.Array, Slots, jax.Array], tuple[jax.Array, Slots, Sampled]]

DONATED = (1, 2)
"""The arguments of a step that it updates in place: KV pages and slots."""


def step_arguments(params: Any, kv_pages: Any, slots: Any, bucket: Bucket, page_size: int) -> tuple[Any, ...]:
    """Shapes and dtypes of a step's arguments, from arrays or from shapes and dtypes."""
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, kv_pages, slots))
    return *state, jax.ShapeDtypeStruct((batches.packed_size(bucket, page_size),), jnp.int32)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """XLA's options for a step, by the platform's name.

    On GPUs XLA splits the contraction of a product with few rows, which makes two launches of it: the product and the
    sum of its parts. The libraries that it calls split on their own where that is faster, within one call.
    """
    return {"xla_gpu_experimental_force_split_k": "1"} if platform == "gpu" else {}


def compile_step(lowered: jax.stages.Lowered, options: dict[str, str | bool]) -> jax.stages.Compiled:
    """The compiled step; without options that this XLA does not know, with a warning: they only save time."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(f"steps are compiled without {', '.join(options)}: {error}", stacklevel=2)
        return lowered.compile()


def make_step(module: Decoder, options: StepOptions, bucket: Bucket) -> StepFunction:
    """`step(params, kv_pages, slots, packed) -> (kv_pages, slots, sampled)`, to be jitted.

    `kv_pages` and `slots` are meant to be donated: `DONATED`. `sampled` has a row per entry of the batch's
    `sample_rows`.
    """

    def step(params: dict, kv_pages: jax.Array, slots: Slots, packed: jax.Array):
        batch = batches.unpack(packed, bucket)
        slots = batches.append_blocks(slots, batch)
        with jax.named_scope("lay_out"):
            layout = batches.lay_out(slots, batch, bucket, options.page_size)
        context = PagedContext(
            kv_pages=kv_pages,
            slot_mapping=layout.slot_mapping,
            kv_lens=layout.kv_lens,
            page_indices=layout.page_indices,
            cu_q_lens=layout.query_start_loc,
            num_seqs=batch.num_rows[None],
            decode_only=bucket.decode_only,
            implementation=options.implementation,
            debug=options.debug,
        )
        # Linen's `apply` is typed for modules with mutable collections; ours return what `__call__` does.
        hidden, context = cast(
            tuple[jax.Array, PagedContext],
            module.apply({"params": params}, layout.token_ids, layout.positions, context),
        )
        last = hidden.at[layout.query_start_loc[batch.sample_rows + 1] - 1].get(mode="clip")
        with jax.named_scope("sample"):
            sampled = _head(module, options, bucket, params, last, slots, batch)
        return context.kv_pages, batches.record_tokens(slots, batch, sampled.tokens), sampled

    return step


def _head(
    module: Decoder,
    options: StepOptions,
    bucket: Bucket,
    params: dict,
    hidden: jax.Array,
    slots: Slots,
    batch: Batch,
) -> Sampled:
    """Logits and sampling of the S rows' last hidden states [S, D]."""
    rows = jnp.minimum(batch.sample_rows, bucket.rows - 1)  # padding repeats a row; its result is dropped

    def logits(n: int) -> jax.Array:
        first = cast(jax.Array, module.apply({"params": params}, hidden[:n], method="logits"))
        return jnp.pad(first, ((0, bucket.rows - n), (0, 0)))

    few = options.small_head
    if bucket.decode_only or not 0 < few < bucket.rows:
        values = logits(bucket.rows)
    else:
        values = jax.lax.cond(batch.num_samples <= few, lambda: logits(few), lambda: logits(bucket.rows))
    return sample(
        values,
        slots,
        batch.slots[rows],
        (batch.starts + batch.query_lens)[rows],
        vocab_size=options.vocab_size,
        max_logprobs=options.max_logprobs,
    )
