"""The public operation: checks its arguments and calls one of the implementations."""

import jax

from pallas_kernels.add_rms_norm import gpu, reference, tpu
from pallas_kernels.checks import check_arrays, check_float, check_shape, pick_implementation

_AVAILABLE = {
    "reference": reference.add_rms_norm,
    "xla": reference.add_rms_norm,
    "gpu": gpu.add_rms_norm,
    "tpu": tpu.add_rms_norm,
}


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """s = x + residual, and s / rms(s) * (offset + weight).

    The sum is rounded to the dtype of x before it is normed, in float32.

    Args:
      x, residual: [T, D], float32, bfloat16 or float16, alike.
      weight: [D], of any of these dtypes.
      eps: added to the mean square.
      offset: 1 for models that store their weights less one (Gemma).
      implementation: "reference", "xla", "gpu", "gpu_hopper", "tpu", or None for the best one here.
      interpret: runs a Pallas implementation on any platform, slowly: for tests.

    Returns:
      Both [T, D], in the dtype of x.

    Raises:
      ValueError: a shape or dtype is wrong; the message shows it.
      NotImplementedError: the implementation does not exist.
    """
    check_arrays(x=x, residual=residual, weight=weight)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be [tokens, dims] with no empty axis, got shape {tuple(x.shape)}")
    check_float("x", x)
    check_shape("residual", residual, x.shape)
    if residual.dtype != x.dtype:
        raise ValueError(f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}")
    check_shape("weight", weight, x.shape[1:])
    check_float("weight", weight)
    norm = pick_implementation("add_rms_norm", implementation, _AVAILABLE, interpret=interpret)
    return norm(x, residual, weight, eps=eps, offset=offset)
