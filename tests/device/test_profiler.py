"""Traces of a process. Each test has one of its own: where a TPU's compiler has been loaded, a trace never ends."""

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
    import sys
    import jax
    import pytest
    from jaxpaged.device.profiler import Profiler
    from jaxpaged.errors import InvalidRequestError

    folder, profiler = sys.argv[1], Profiler()
"""
WRITTEN_ONCE_STOPPED = """
    profiler.start(folder)
    with pytest.raises(InvalidRequestError, match="already"):
        profiler.start(folder)
    jax.numpy.ones(3).block_until_ready()
    profiler.stop()
    with pytest.raises(InvalidRequestError, match="no profile"):
        profiler.stop()
"""
# JAX has but one trace at a time; ours is not thought to run then.
STARTED_OTHERWISE = """
    jax.profiler.start_trace(folder)
    with pytest.raises(InvalidRequestError, match="already"):
        profiler.start(folder)
    jax.profiler.stop_trace()
    profiler.start(folder)
    profiler.stop()
"""


@pytest.mark.parametrize("script", [WRITTEN_ONCE_STOPPED, STARTED_OTHERWISE], ids=["once stopped", "started otherwise"])
def test_a_trace_is_written(tmp_path, script) -> None:
    program = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
