"""The two functions that run on the device each step: `forward`, to logits, and `sample`, to tokens.

They are two, so that the host can fill in grammar masks, which depend on the tokens of the step before, while the
forward pass runs. Every bucket is a compilation of `forward`, every number of rows one of `sample`, and one of
`sample_plain`, for the most likely tokens only. `decode_program` has a `forward` that goes on
for several steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxpaged.device import batch as batches
from jaxpaged.device.batch import Batch, SampleRows
from jaxpaged.device.buckets import Bucket, ResultSizes
from jaxpaged.device.draw import most_likely
from jaxpaged.device.kv_cache import pages_format
from jaxpaged.device.logits_processor import LogitsProcessor
from jaxpaged.device.options import Options, mask_words
from jaxpaged.device.sampling import Sampled
from jaxpaged.device.sampling import sample as sample_tokens
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
      processors: logits processors that requests may name.
    """

    page_size: int
    vocab_size: int
    max_logprobs: int
    implementation: str | None
    debug: bool = False
    small_head: int = 0
    processors: tuple[LogitsProcessor, ...] = ()


class Forwarded(NamedTuple):
    """What the forward pass of a bucket leaves, besides the state.

    Attributes:
      logits: f32[R, V], raw, of the rows that sample; R >= S.
      rows: which these are.
      hidden: [at least T, D], of every token after the final norm.
    """

    logits: jax.Array
    rows: SampleRows
    hidden: jax.Array


Forward = Callable[[dict, jax.Array, Slots, jax.Array], tuple[jax.Array, Slots, Forwarded]]
Sample = Callable[[Slots, Options, jax.Array, SampleRows, jax.Array], tuple[Slots, Sampled]]
SamplePlain = Callable[[Slots, jax.Array, SampleRows], tuple[Slots, jax.Array]]

FORWARD_DONATED = (1, 2)
"""The arguments of `forward` that it updates in place: KV pages and slots."""
SAMPLE_DONATED = (0,)
"""That of `sample` and `sample_plain`: slots."""


def forward_arguments(params: Any, kv_pages: Any, slots: Any, bucket: Bucket, page_size: int) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of `forward`, from arrays or from shapes and dtypes."""
    packed = jax.ShapeDtypeStruct((batches.packed_size(bucket, page_size),), jnp.int32)
    return *abstract((params, kv_pages, slots)), packed


def sample_arguments(slots: Any, wide: Any, num_rows: int, vocab_rows: int) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of `sample`; `vocab_rows` are those of the head."""
    row: Any = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return (
        *abstract((slots, wide)),
        jax.ShapeDtypeStruct((num_rows, vocab_rows), jnp.float32),
        SampleRows(row, row),
        jax.ShapeDtypeStruct((num_rows, mask_words(vocab_rows)), jnp.int32),
    )


def sample_plain_arguments(slots: Any, num_rows: int, vocab_rows: int) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments of `sample_plain`."""
    slots, _, logits, rows, _ = sample_arguments(slots, (), num_rows, vocab_rows)
    return slots, logits, rows


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of a pytree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """XLA's options for a step, by the platform's name.

    On GPUs XLA splits the contraction of a product with few rows, which makes two launches of it: the product and the
    sum of its parts. The libraries that it calls split on their own where that is faster, within one call.

    On CPUs what XLA does for faster code takes twice the CPU time to compile, and steps are no faster for it.
    """
    options: dict[str, dict[str, str | bool]] = {
        "gpu": {"xla_gpu_experimental_force_split_k": "1"},
        "cpu": {"xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_COMPILE"},
    }
    return options.get(platform, {})


def step_compiler_options() -> dict[str, str | bool]:
    """`compiler_options` for this device."""
    return compiler_options(jax.default_backend())


def lower_forward(
    module: Decoder, options: StepOptions, bucket: Bucket, sizes: ResultSizes, arguments: tuple[Any, ...]
) -> jax.stages.Lowered:
    """`make_forward`, ready to be compiled for this device: its pool lies as `kv_cache.pages_format` says."""
    return lower_in_place(make_forward(module, options, bucket, sizes), arguments, num_results=3)


def lower_in_place(function: Callable[..., Any], arguments: tuple[Any, ...], *, num_results: int) -> jax.stages.Lowered:
    """A function of params, KV pages, slots and more that updates pages and slots, its first results, in place."""
    order = pages_format()
    orders: dict[str, Any] = {}
    if order is not None:
        others = [None] * (len(arguments) - 2)
        orders = {"in_shardings": (None, order, *others), "out_shardings": (order, *[None] * (num_results - 1))}
    return jax.jit(function, donate_argnums=FORWARD_DONATED, **orders).lower(*arguments)


def compile_step(lowered: jax.stages.Lowered, options: dict[str, str | bool] | None) -> jax.stages.Compiled:
    """The compiled program; without options that this XLA does not know, with a warning: they only save time."""
    if not options:
        return lowered.compile()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(f"steps are compiled without {', '.join(options)}: {error}", stacklevel=2)
        return lowered.compile()


def program_bytes(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes of a program's results that are not updated in place, and of its temporaries."""
    analysis = program.memory_analysis()
    assert analysis is not None, "every backend that has memory to measure can analyse it"
    return analysis.output_size_in_bytes - analysis.alias_size_in_bytes, analysis.temp_size_in_bytes


def make_forward(module: Decoder, options: StepOptions, bucket: Bucket, sizes: ResultSizes) -> Forward:
    """`forward(params, kv_pages, slots, packed) -> (kv_pages, slots, forwarded)`, to be jitted.

    `kv_pages` and `slots` are meant to be donated: `FORWARD_DONATED`.

    Args:
      sizes: at least the bucket's; the rest is padding.
    """

    compute = make_compute(module, options, bucket, sizes)

    def forward(params: dict, kv_pages: jax.Array, slots: Slots, packed: jax.Array):
        batch = batches.unpack(packed, bucket)
        slots = batches.append_blocks(slots, batch)
        kv_pages, forwarded = compute(params, kv_pages, slots, batch)
        return kv_pages, slots, forwarded

    return forward


def make_compute(
    module: Decoder, options: StepOptions, bucket: Bucket, sizes: ResultSizes
) -> Callable[[dict, jax.Array, Slots, Batch], tuple[jax.Array, Forwarded]]:
    """The forward pass of rows whose blocks are in their tables."""

    def compute(params: dict, kv_pages: jax.Array, slots: Slots, batch: Batch):
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
        logits = _head(module, options, bucket, sizes.logits, params, last, batch)
        rows = batches.rows_to_sample(slots, batch, sizes.logits)
        hidden = jnp.pad(hidden, ((0, sizes.hidden - bucket.tokens), (0, 0)))
        return context.kv_pages, Forwarded(logits, rows, hidden)

    return compute


def make_sample(options: StepOptions) -> Sample:
    """`sample(slots, wide, logits, rows, masks) -> (slots, sampled)`, to be jitted; see `sampling.sample`.

    `slots` are meant to be donated: `SAMPLE_DONATED`. `sampled` has a row per row of the logits.
    """

    def sample(slots: Slots, wide: Options, logits: jax.Array, rows: SampleRows, masks: jax.Array):
        with jax.named_scope("sample"):
            sampled = sample_tokens(
                logits,
                slots,
                wide,
                rows.slots,
                rows.positions,
                masks,
                vocab_size=options.vocab_size,
                max_logprobs=options.max_logprobs,
                processors=options.processors,
            )
        return batches.record_tokens(slots, rows, sampled.tokens), sampled

    return sample


def make_sample_plain(options: StepOptions) -> SamplePlain:
    """`sample_plain(slots, logits, rows) -> (slots, tokens)`: what `sample` does where no row uses a `Feature`."""

    def sample_plain(slots: Slots, logits: jax.Array, rows: SampleRows):
        with jax.named_scope("sample"):
            tokens = most_likely(logits, options.vocab_size)
        return batches.record_tokens(slots, rows, tokens), tokens

    return sample_plain


def _head(
    module: Decoder,
    options: StepOptions,
    bucket: Bucket,
    num_logits: int,
    params: dict,
    hidden: jax.Array,
    batch: Batch,
) -> jax.Array:
    """Logits [R, V] of the last hidden states [S, D] of the rows that sample, which come first."""

    def logits(n: int) -> jax.Array:
        first = cast(jax.Array, module.apply({"params": params}, hidden[:n], method="logits"))
        return jnp.pad(first, ((0, num_logits - n), (0, 0)))

    few = options.small_head
    if bucket.decode_only or not 0 < few < bucket.rows:
        return logits(bucket.rows)
    return jax.lax.cond(batch.num_samples <= few, lambda: logits(few), lambda: logits(bucket.rows))
