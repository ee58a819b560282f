"""Rotary embedding of queries and keys, and the write of keys and values into the paged KV pool."""

from pallas_kernels.write_kv.api import write_kv

__all__ = ["write_kv"]
