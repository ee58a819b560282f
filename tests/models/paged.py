"""Runs a model over a paged cache, step by step, as an engine does: for tests."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.attention import DenseContext, PagedContext
from jaxpaged.models import get_family
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder

PAGE_SIZE = 8
PAGES_PER_ROW = 6
ROWS = 2
QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # compiling is what these tests spend their time on


def assemble_params(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Parameters from a checkpoint's tensors, each used exactly once."""
    params: dict[str, Any] = {}
    used: list[str] = []
    for weight in get_family(config.model_type).table(config).weights:
        *folders, leaf = weight.path.split("/")
        place = params
        for folder in folders:
            place = place.setdefault(folder, {})
        assert leaf not in place, weight.path
        place[leaf] = weight.assemble([tensors[name] for name in weight.sources])
        used += weight.sources
    assert len(used) == len(set(used))
    return params


class PagedModel:
    """A model with two rows of cache whose unused slots hold NaN, and two compiled programs: mixed and decode."""

    def __init__(self, module: Decoder, params: Any, *, tokens: int, implementation: str | None = None):
        self._params = jax.device_put(params)
        self._tokens = tokens
        self._step: Callable[..., Any] = jax.jit(
            partial(_step, module, implementation),
            donate_argnums=(1,),
            static_argnames="decode",
            compiler_options=QUICK_COMPILE,
        )
        config = module.config
        pool = (config.num_layers, 1 + ROWS * PAGES_PER_ROW, PAGE_SIZE, 2 * config.num_kv_heads, config.head_dim)
        self._pages = jnp.full(pool, jnp.nan, module.dtype)
        ids = 1 + np.random.default_rng(0).permutation(ROWS * PAGES_PER_ROW)
        self._page_indices = ids.reshape(ROWS, PAGES_PER_ROW).astype(np.int32)
        self.lengths = [0] * ROWS

    def feed(self, chunks: Sequence[tuple[int, np.ndarray]], *, decode: bool = False) -> list[np.ndarray]:
        """Appends tokens to sequences; decodes first, as the ops ask for.

        Args:
          chunks: (sequence 0 or 1, its next token ids), one-token chunks before longer ones.
          decode: use the program with one token a row.

        Returns:
          Logits float32 [len(token_ids), V] of each chunk.
        """
        total = ROWS if decode else self._tokens
        token_ids, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
        slots = np.arange(total, dtype=np.int32) % PAGE_SIZE  # padding writes to page 0
        kv_lens, cu_q_lens = np.zeros(ROWS, np.int32), np.zeros(ROWS + 1, np.int32)
        page_indices = np.zeros((ROWS, PAGES_PER_ROW), np.int32)
        start = 0
        for row, (sequence, ids) in enumerate(chunks):
            stop, pages = start + len(ids), self._page_indices[sequence]
            where = self.lengths[sequence] + np.arange(len(ids))
            token_ids[start:stop], positions[start:stop] = ids, where
            slots[start:stop] = pages[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
            self.lengths[sequence] += len(ids)
            kv_lens[row], page_indices[row] = self.lengths[sequence], pages
            start = stop
            cu_q_lens[row + 1 :] = stop
        num_seqs = np.array([len(chunks)], np.int32)
        context = (slots, kv_lens, page_indices, cu_q_lens, num_seqs)
        logits, self._pages = self._step(self._params, self._pages, token_ids, positions, *context, decode=decode)
        return np.split(np.asarray(logits)[:start], cu_q_lens[1 : len(chunks)])

    def restart(self) -> None:
        """Forgets both sequences; what they left in the pool stays there."""
        self.lengths = [0] * ROWS


def _step(
    module: Decoder,
    implementation: str | None,
    params: Any,
    kv_pages: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    decode: bool,
) -> tuple[jax.Array, jax.Array]:
    context = PagedContext(
        kv_pages,
        slots,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        decode_only=decode,
        implementation=implementation,
        interpret=True,
    )
    hidden, context = module.apply({"params": params}, token_ids, positions, context)
    return module.apply({"params": params}, hidden, method="logits"), context.kv_pages


def dense_logits(module: Decoder, params: Any, token_ids: jax.Array) -> jax.Array:
    """Logits float32 [T, V] of one sequence without a cache; differentiable."""
    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = module.apply({"params": params}, token_ids, positions, DenseContext())
    return module.apply({"params": params}, hidden, method="logits")
