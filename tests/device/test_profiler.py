"""Traces of a process."""

import jax
import pytest

from jaxpaged.device.profiler import Profiler
from jaxpaged.errors import InvalidRequestError


def test_a_trace_is_written_once_it_is_stopped(tmp_path):
    profiler = Profiler()
    profiler.start(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="already"):
        profiler.start(str(tmp_path))
    jax.numpy.ones(3).block_until_ready()
    profiler.stop()
    with pytest.raises(InvalidRequestError, match="no profile"):
        profiler.stop()
    assert [path for path in tmp_path.rglob("*") if path.is_file()]


def test_whoever_starts_jaxs_profiler_otherwise_is_told(tmp_path):
    """It has but one trace at a time; ours is not thought to run then."""
    jax.profiler.start_trace(str(tmp_path))
    profiler = Profiler()
    try:
        with pytest.raises(InvalidRequestError, match="already"):
            profiler.start(str(tmp_path))
    finally:
        jax.profiler.stop_trace()
    profiler.start(str(tmp_path))
    profiler.stop()
