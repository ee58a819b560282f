"""What every operation over the paged KV pool demands of its arguments."""

import functools
from collections.abc import Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
POOL_DTYPES = (*FLOAT_DTYPES, "uint16", "float8_e4m3fn", "float8_e5m2", "int8")
IMPLEMENTATIONS = ("reference", "xla", "gpu", "gpu_hopper", "tpu")
_PALLAS = ("gpu", "gpu_hopper", "tpu")


def check_arrays(**arrays: Any) -> None:
    """Raises ValueError unless all of these are arrays."""
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} must be an array, got {array!r}")


def check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` has exactly this shape."""
    if jnp.shape(array) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {jnp.shape(array)}")


def check_index(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` is an int32 array of this shape."""
    check_shape(name, array, shape)
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}")


def check_float(name: str, array: Any) -> None:
    """Raises ValueError unless `array` is float32, bfloat16 or float16."""
    if str(array.dtype) not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {array.dtype}")


def check_packed(name: str, array: Any) -> tuple[int, int, int]:
    """The shape [tokens, heads, head_dim] of a packed float array; raises ValueError if it is anything else."""
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"{name} must be [tokens, heads, head_dim] with no empty axis, got shape {tuple(array.shape)}")
    check_float(name, array)
    return array.shape


def check_pool(kv_pages: Any) -> tuple[int, int, int, int, int]:
    """The sizes (L, P, page_size, K, H) of a pool [L, P, page_size, 2K, H]; raises ValueError if it is no such pool."""
    if kv_pages.ndim != 5 or 0 in kv_pages.shape:
        raise ValueError(
            "kv_pages must be [layers, pages, page_size, 2 * kv_heads, head_dim] with no empty axis, "
            f"got shape {tuple(kv_pages.shape)}"
        )
    layers, pages, page_size, heads, head_dim = kv_pages.shape
    if page_size & (page_size - 1):
        raise ValueError(f"page_size (axis 2 of kv_pages) must be a power of two, got {page_size}")
    if heads % 2:
        raise ValueError(f"kv_pages must interleave K and V heads (an even number, axis 3), got {heads}")
    if str(kv_pages.dtype) not in POOL_DTYPES:
        raise ValueError(f"kv_pages must be one of {', '.join(POOL_DTYPES)}, got {kv_pages.dtype}")
    if layers * pages * page_size >= 2**31:
        raise ValueError(f"kv_pages has {layers * pages * page_size} slots, more than int32 can index")
    return layers, pages, page_size, heads // 2, head_dim


def check_scale(name: str, scale: Any) -> jax.Array | None:
    """The scale as f32[]; raises ValueError unless it is a number, an array of one, or None, which stays None."""
    if scale is None:
        return None
    if isinstance(scale, bool) or (not isinstance(scale, Real) and getattr(scale, "size", None) != 1):
        raise ValueError(f"{name} must be a number or an array of one, got {scale!r}")
    return jnp.reshape(jnp.asarray(scale, jnp.float32), ())


def best_implementation() -> str:
    """The implementation for the device that programs are compiled for by default."""
    kind = tuning.current_device()
    if kind.startswith("NVIDIA"):
        return "gpu"
    return "tpu" if kind.startswith("TPU") else "xla"


def pick_implementation(
    op: str, implementation: str | None, available: Mapping[str, Any], *, interpret: bool = False
) -> Any:
    """The function to run: the named one, or the best that this platform has.

    Args:
      op: name of the operation, for messages.
      implementation: one of IMPLEMENTATIONS, or None.
      available: implementation name -> function.
      interpret: the function returned, if written in Pallas, is interpreted rather than compiled.

    Raises:
      ValueError: no such implementation exists.
      NotImplementedError: it is a known one, but `op` does not have it.
    """
    if implementation is None:
        best = best_implementation()
        implementation = best if best in available else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation not in available:
        raise NotImplementedError(f"{op} has no implementation {implementation!r}; it has {', '.join(available)}")
    chosen = available[implementation]
    if implementation in _PALLAS:
        chosen = functools.partial(chosen, interpret=interpret)
    return jax.enable_x64(False)(chosen)  # numbers and indices have 32 bits, whatever is the caller's default
