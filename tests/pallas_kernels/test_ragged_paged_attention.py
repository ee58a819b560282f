import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, make_inputs

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name):
    inputs = make_inputs(CASES[name], seed=len(name))
    want = ragged_paged_attention(*inputs.arrays, **inputs.options, implementation="reference")
    got = ragged_paged_attention(*inputs.arrays, **inputs.options, implementation="xla")
    assert np.isfinite(np.asarray(want, np.float32)).all()
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        np.asarray(want, np.float32),
        atol=TOLERANCE[CASES[name].dtype],
        rtol=TOLERANCE[CASES[name].dtype],
    )
