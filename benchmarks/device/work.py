"""What a model's step has to do on a GPU: the bytes, the FLOPs and the launches of each of its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from benchmarks import configs
from jaxpaged import models
from jaxpaged.config import EngineConfig
from jaxpaged.device import kv_cache
from jaxpaged.device.abstract_step import weight_bytes
from jaxpaged.models.config import ModelConfig
from pallas_kernels import timing
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.tiles import Shape, decode_tiles

# As `pallas_kernels.deviceless` counts them, beside the final norm and the head; those of a mixed step; sampling's.
LAY_OUT_LAUNCHES, LAY_OUT_LAUNCHES_MIXED, SAMPLE_LAUNCHES = 8, 18, 6


@dataclass(frozen=True)
class Op:
    """An operation of a step.

    Attributes:
      kind: "product", "attend" or "other": operations of a kind reach the same share of what a device can do.
      weights, cache, activations: bytes that one of it reads or writes of weights, of KV pages, and of the rest.
      flops: of its products.
      launches: of one.
      count: how many of it the step has.
    """

    name: str
    kind: str
    weights: int = 0
    cache: int = 0
    activations: int = 0
    flops: int = 0
    launches: int = 1
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class Work:
    """A step of a model.

    Attributes:
      config, params: of the model; its weights' shapes and dtypes.
      rows: (queries, keys) of each, those with one query first.
      dtype, cache_dtype: of weights and activations; of KV pages.
      page_size: tokens in a KV page.
    """

    config: ModelConfig
    params: Mapping[str, Any]
    rows: tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    page_size: int = EngineConfig.block_size

    @property
    def max_pages(self) -> int:
        """Of a row."""
        return -(-self.config.max_context_len // self.page_size)

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.rows)

    @property
    def width(self) -> int:
        """Bytes of a weight, and of a number between operations."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def memory(self) -> int:
        """Bytes of weights, and of the keys and values of the rows."""
        per_token = kv_cache.page_bytes(self.config, 1, self.cache_dtype, "gpu")
        return weight_bytes(self.params) + per_token * sum(keys for _, keys in self.rows)

    def ops(self) -> list[Op]:
        """What the step does; equal operations of all layers are one entry."""
        c, tokens = self.config, self.tokens
        mixed = tokens > len(self.rows)
        found: Counter[Op] = Counter()
        for i, window in enumerate(c.sliding_windows):
            found.update(self._layer(self.params[f"layers_{i}"], window))
        page_table = 4 * len(self.rows) * self.max_pages
        head = self.params["embed" if c.tie_word_embeddings else "lm_head"]
        logits = 4 * len(self.rows) * c.vocab_size
        hidden = tokens * c.hidden_size * self.width
        return [
            Op(
                "lay out, embed",
                "other",
                weights=hidden,
                activations=hidden + 2 * page_table,
                launches=LAY_OUT_LAUNCHES_MIXED if mixed else LAY_OUT_LAUNCHES,
            ),
            *(replace(op, count=count) for op, count in found.items()),
            self._norm("final norm", self.params["final_norm"]),
            replace(
                self._product("head", head, len(self.rows)), activations=logits + hidden * len(self.rows) // tokens
            ),
            Op("sample", "other", activations=logits, launches=SAMPLE_LAUNCHES),
        ]

    def _layer(self, params: Mapping[str, Any], window: int | None) -> list[Op]:
        c, tokens, width = self.config, self.tokens, self.width
        attn, mlp = params["attn"], params["mlp"]
        norms = [leaf for name, leaf in params.items() if name.endswith("norm")]
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        written = tokens * 2 * kv_heads * dim * jnp.dtype(self.cache_dtype).itemsize
        ffn = tokens * c.intermediate_size * width
        return [
            *(replace(self._norm("norm", *norms[i::2]), name="norm") for i in range(2)),
            self._product("qkv", attn["qkv"], tokens, attn.get("qkv_bias")),
            Op(
                "write_kv",
                "other",
                weights=weight_bytes([attn[name] for name in ("q_norm", "k_norm") if name in attn]),
                cache=written,
                activations=tokens * dim * (2 * heads + 2 * kv_heads) * width + 4 * tokens * dim,
            ),
            self._attend(window),
            self._product("out", attn["o"], tokens, attn.get("o_bias")),
            self._product("gate_up", mlp["gate_up"], tokens, mlp.get("gate_up_bias")),
            Op("activation", "other", activations=3 * ffn),
            self._product("down", mlp["down"], tokens, mlp.get("down_bias")),
        ]

    def _norm(self, name: str, *weights: Any) -> Op:
        """Reads the residual stream and what is added, writes their sum and its norm."""
        stream = self.tokens * self.config.hidden_size * self.width
        return Op(name, "other", weights=weight_bytes(weights), activations=4 * stream)

    def _product(self, name: str, weight: Any, tokens: int, bias: Any = None) -> Op:
        """Of tokens [T, in] and a weight [..., in]."""
        read = weight.shape[-1]
        activations = tokens * (read + weight.size // read) * self.width
        held = weight_bytes([weight, bias])
        return Op(name, "product", weights=held, activations=activations, flops=2 * tokens * weight.size)

    def _attend(self, window: int | None) -> Op:
        c = self.config
        case = Case(
            rows=self.rows,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            dtype=self.dtype,
            pool_dtype=self.cache_dtype,
            sliding_window=window,
        )
        rows = len(self.rows)
        shape = Shape(
            tokens=self.tokens,
            rows=rows,
            kv_heads=c.num_kv_heads,
            group=c.num_heads // c.num_kv_heads,
            head_dim=c.head_dim,
            pool_dtype=self.cache_dtype,
            compute_bytes=self.width,
            page_size=self.page_size,
            max_pages=self.max_pages,
        )
        split = decode_tiles(shape).splits > 1
        queries = 2 * self.tokens * c.num_heads * c.head_dim * self.width
        return Op(
            f"attend, {window} keys" if window else "attend",
            "attend",
            cache=timing.attention_bytes(case) - queries,
            activations=queries,
            flops=timing.attention_flops(case),
            launches=1 + split + (self.tokens > rows),
        )


def work(
    model: str | Mapping[str, Any],
    rows: Sequence[tuple[int, int]],
    *,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    page_size: int = EngineConfig.block_size,
) -> Work:
    """A step of a model: a config.json's content, or what `configs.load` knows.

    Args:
      cache_dtype: of KV pages; None: that of the weights.
      page_size: tokens in a KV page.
    """
    raw = configs.load(model) if isinstance(model, str) else model
    family = models.get_family(raw["model_type"])
    config = family.config_from_hf(raw)
    params = models.abstract_params(family.module(config=config, dtype=jnp.dtype(dtype)))
    return Work(config, params, tuple(rows), dtype, cache_dtype or dtype, page_size)


def step_rows(rows: int, context: int, chunk: int = 0) -> list[tuple[int, int]]:
    """(queries, keys) of `rows` decodes after `context` tokens, and of a prompt's first `chunk` tokens."""
    return [(1, context)] * rows + ([(chunk, chunk)] if chunk else [])
