"""Rotary embedding of queries and keys, and the write of keys and values into the paged KV pool."""

from pallas_kernels.write_kv.api import write_kv
from pallas_kernels.write_kv.head_norm import HeadNorm

__all__ = ["HeadNorm", "write_kv"]
