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
    delta: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    delta_weight: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """s = x + delta, and s / rms(s) * (offset + weight).

    The sum is rounded to the dtype of x before it is normed, in float32; so is a delta that is normed first.

    Args:
      x, delta: [T, D], float32, bfloat16 or float16, alike.
      weight: [D], of any of these dtypes.
      eps: added to the mean square.
      offset: 1 for models that store their weights less one (Gemma).
      delta_weight: [D]: delta is replaced by delta / rms(delta) * (offset + delta_weight); None: added as it is.
      implementation: "reference", "xla", "gpu", "gpu_hopper", "tpu", or None for the best one here.
      interpret: runs a Pallas implementation on any platform, slowly: for tests.

    Returns:
      Both [T, D], in the dtype of x.

    Raises:
      ValueError: a shape or dtype is wrong; the message shows it.
      NotImplementedError: the implementation does not exist.
    """
    weights = {"weight": weight} if delta_weight is None else {"weight": weight, "delta_weight": delta_weight}
    check_arrays(x=x, delta=delta, **weights)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be [tokens, dims] with no empty axis, got shape {tuple(x.shape)}")
    check_float("x", x)
    check_shape("delta", delta, x.shape)
    if delta.dtype != x.dtype:
        raise ValueError(f"delta must have the dtype of x, {x.dtype}, got {delta.dtype}")
    for name, vector in weights.items():
        check_shape(name, vector, x.shape[1:])
        check_float(name, vector)
    norm = pick_implementation("add_rms_norm", implementation, _AVAILABLE, interpret=interpret)
    return norm(x, delta, weight, delta_weight, eps=eps, offset=offset)
