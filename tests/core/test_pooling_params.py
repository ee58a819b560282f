"""What an embedding is made of, and what of it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.errors import InvalidRequestError

SUM = np.array([6.0, 8.0, 24.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"normalize": False}, [3, 4, 12]),
        ({}, [3 / 13, 4 / 13, 12 / 13]),
        ({"dimensions": 2}, [0.6, 0.8]),
        ({"dimensions": 2, "normalize": False}, [3, 4]),
        ({"dimensions": 3}, [3 / 13, 4 / 13, 12 / 13]),
    ],
)
def test_cut_then_scaled(options, expected):
    vector = PoolingParams(**options).vector(SUM, 2)
    assert vector.dtype == np.dtype("<f4")
    np.testing.assert_allclose(vector, expected, rtol=1e-6)


def test_nothing_has_no_direction():
    assert PoolingParams(dimensions=1).vector(np.zeros(3), 2).tolist() == [0.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("pooling", value) for value in ("cls", "", 1, True)),
        *(("normalize", value) for value in (None, 1, "yes")),
        *(("dimensions", value) for value in (0, -1, 1.0, True, "8")),
    ],
)
def test_what_is_refused(field, value):
    with pytest.raises(InvalidRequestError, match=f"{field}={value!r}") as caught:
        PoolingParams(**{field: value})
    assert caught.value.param == field
