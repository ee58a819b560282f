"""The end of one part of a residual layer and the beginning of the next: add, then RMS norm."""

from pallas_kernels.add_rms_norm.api import add_rms_norm

__all__ = ["add_rms_norm"]
