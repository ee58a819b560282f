"""Operations of a paged-attention engine, usable without it: this package imports jax and numpy only.

One folder per operation, with the same file names in each: `api.py` checks the arguments and picks an implementation,
`reference.py` is the specification, `xla.py` runs on any device, `gpu.py` and `tpu.py` are Pallas. See README.md.
"""

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.pool import storage_dtype
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_kv import HeadNorm, write_kv

__all__ = ["HeadNorm", "add_rms_norm", "ragged_paged_attention", "storage_dtype", "write_kv"]
