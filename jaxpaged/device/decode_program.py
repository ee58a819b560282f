"""`decode`: several decode steps in one program, of which the host hears at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.device import batch as batches
from jaxpaged.device.buckets import Bucket, ResultSizes
from jaxpaged.device.draw import most_likely
from jaxpaged.device.options import Options
from jaxpaged.device.rows import in_place_if
from jaxpaged.device.sampling import sample as sample_tokens
from jaxpaged.device.slots import NEEDS_HOST, Slots
from jaxpaged.device.step_program import (
    Forwarded,
    StepOptions,
    abstract,
    forward_arguments,
    lower_in_place,
    make_compute,
)
from jaxpaged.models.decoder import Decoder


class Decoded(NamedTuple):
    """What several steps leave, besides the state and what the last of them has `Forwarded`.

    Attributes:
      num_steps: i32[], how many were done.
      tokens: i32[max_steps - 1, R], of all of them but the last.
    """

    num_steps: jax.Array
    tokens: jax.Array


Decode = Callable[[dict, jax.Array, Slots, Options, jax.Array], tuple[jax.Array, Slots, Forwarded, Decoded]]


def decode_arguments(
    params: Any, kv_pages: Any, slots: Any, wide: Any, bucket: Bucket, page_size: int
) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of `decode`."""
    *others, packed = forward_arguments(params, kv_pages, slots, bucket, page_size)
    return *others, abstract(wide), packed


def lower_decode(
    module: Decoder,
    options: StepOptions,
    bucket: Bucket,
    sizes: ResultSizes,
    max_steps: int,
    arguments: tuple[Any, ...],
) -> jax.stages.Lowered:
    """`make_decode`, ready to be compiled for this device; see `lower_forward`."""
    return lower_in_place(make_decode(module, options, bucket, sizes, max_steps), arguments, num_results=4)


def make_decode(module: Decoder, options: StepOptions, bucket: Bucket, sizes: ResultSizes, max_steps: int) -> Decode:
    """`decode(params, kv_pages, slots, wide, packed) -> (kv_pages, slots, forwarded, decoded)`, to be jitted.

    It is as many `forward` as `batch.num_steps` says, and samples between two of them. It stops early when a row has
    got one of its stop ids, or no token. The last step that it comes to is to be sampled as ever: if it stopped early,
    that gives the same tokens once more.

    Args:
      max_steps: at least `batch.num_steps`.
    """
    compute = make_compute(module, options, bucket, sizes)

    def decode(params: dict, kv_pages: jax.Array, slots: Slots, wide: Options, packed: jax.Array):
        first = batches.unpack(packed, bucket)
        slots = batches.append_blocks(slots, first)

        def step(state: _Decoding) -> _Decoding:
            now = slots._replace(history=state.history)
            batch = first._replace(starts=first.starts + state.num_steps)
            kv_pages, forwarded = compute(params, state.kv_pages, now, batch)
            num_steps = state.num_steps + 1

            def go_on(so_far: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
                history, all_tokens, _ = so_far
                now = slots._replace(history=history)
                with jax.named_scope("sample"):
                    tokens = _sample_alone(options, now, wide, forwarded)
                ended = (tokens < 0) | jnp.any(now.stop_ids[forwarded.rows.slots] == tokens[:, None], axis=-1)
                live = jnp.arange(sizes.logits) < batch.num_samples
                later = batches.record_tokens(now, forwarded.rows, tokens)
                return later.history, all_tokens.at[num_steps - 1].set(tokens), jnp.any(ended & live)

            so_far = state.history, state.tokens, jnp.asarray(True)
            history, tokens, ended = in_place_if(num_steps < batch.num_steps, go_on, so_far)
            return _Decoding(num_steps, ended, kv_pages, history, tokens, forwarded)

        shapes = jax.eval_shape(compute, params, kv_pages, slots, first)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        tokens = jnp.zeros((max_steps - 1, sizes.logits), jnp.int32)
        state = _Decoding(jnp.int32(0), jnp.asarray(False), kv_pages, slots.history, tokens, nothing)
        state = jax.lax.while_loop(lambda state: ~state.ended, step, state)
        slots = slots._replace(history=state.history)
        return state.kv_pages, slots, state.forwarded, Decoded(state.num_steps, state.tokens)

    return decode


class _Decoding(NamedTuple):
    """What `decode` hands from step to step."""

    num_steps: jax.Array
    ended: jax.Array
    kv_pages: jax.Array
    history: jax.Array
    tokens: jax.Array
    forwarded: Forwarded


def _sample_alone(options: StepOptions, slots: Slots, wide: Options, forwarded: Forwarded) -> jax.Array:
    """i32[R]: what the programs of sampling give, where no row needs the host."""
    logits, rows, _ = forwarded

    def full() -> jax.Array:
        return sample_tokens(
            logits,
            slots,
            wide,
            rows.slots,
            rows.positions,
            jnp.zeros((len(logits), 0), jnp.int32),
            vocab_size=options.vocab_size,
            max_logprobs=0,
            processors=options.processors,
            without=NEEDS_HOST,
        ).tokens

    featured = jnp.any(slots.column("features", rows.slots) != 0)
    return jax.lax.cond(featured, full, lambda: most_likely(logits, options.vocab_size))
