"""Attention of packed ragged queries over a paged KV pool."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
