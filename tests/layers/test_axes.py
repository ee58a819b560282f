"""Logical axes reach the mesh through one table."""

import pytest
from jax.sharding import PartitionSpec

from jaxpaged.layers.axes import mesh_spec


def test_logical_axes_become_mesh_axes():
    assert mesh_spec(("kv_heads", None, "head_dim", "embed")) == PartitionSpec("tp", None, None, None)


def test_an_axis_must_be_in_the_table():
    with pytest.raises(KeyError, match="kv_head"):
        mesh_spec(("kv_head",))
