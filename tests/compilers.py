"""The compilers for devices that are not there: `make test` installs them, elsewhere they may be missing."""

import os

import pytest

from pallas_kernels.deviceless import missing

needs_compilers = pytest.mark.skipif(
    bool(missing()) and "JAXPAGED_NEEDS_COMPILERS" not in os.environ,
    reason=f"needs {', '.join(missing())}: `make test` installs them, see pallas_kernels/deviceless/compilers.py",
)
"""Skips where they are missing; with JAXPAGED_NEEDS_COMPILERS set the tests run, and fail."""
