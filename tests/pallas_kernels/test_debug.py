"""What `debug=True` finds in the arrays of a call, outside and inside of jit."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ragged_paged_attention, write_kv
from pallas_kernels.ragged_paged_attention.cases import CASES, make_inputs

NAMES = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "num_seqs", "layer")
CASE = CASES["many_queries_in_a_decode_shape"]  # rows (1, 40), (2, 20), (2, 2); 5 rows, page size 16

WRONG = [
    ("page_indices", (0, 2), 99, r"page_indices\[0\]\[2\] must be in \[0, 10\), got 99"),
    ("page_indices", (1, 0), -1, r"page_indices\[1\]\[0\].*got -1"),
    ("kv_lens", 0, 81, r"kv_lens\[0\].*at most the 80 tokens.*got 81"),
    ("kv_lens", 1, 1, r"kv_lens\[1\] must be at least the row's 2 queries.*got 1"),
    ("cu_q_lens", 0, 1, r"cu_q_lens\[0\] must be 0, got 1"),
    ("cu_q_lens", 2, 0, r"got -1"),
    ("cu_q_lens", 3, 7, r"cu_q_lens\[3\] must be in \[0, 6\), got 7"),
    ("num_seqs", 0, 6, r"num_seqs\[0\] must be in \[0, 6\), got 6"),
    ("layer", 0, 2, r"layer\[0\] must be in \[0, 2\), got 2"),
]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("name", "index", "value", "message"), WRONG)
def test_attention_names_the_number(name, index, value, message, jit):
    inputs = make_inputs(CASE, seed=0)
    arrays = list(inputs.arrays)
    at = NAMES.index(name)
    arrays[at] = arrays[at].at[index].set(value)
    op = partial(ragged_paged_attention, **inputs.options, implementation="xla", debug=True)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready((jax.jit(op) if jit else op)(*arrays))
        jax.effects_barrier()


@pytest.mark.parametrize("name", ["mixed_empty_rows", "decode_nothing", "page_8_mha_head_dim_80_float32_pool"])
def test_attention_lets_right_batches_pass(name):
    """Whatever lies in padding."""
    inputs = make_inputs(CASES[name], seed=1)
    ragged_paged_attention(*inputs.arrays, **inputs.options, implementation="xla", debug=True)


def test_a_promise_of_decodes_is_checked():
    inputs = make_inputs(CASE, seed=0)
    with pytest.raises(ValueError, match="got 2"):
        ragged_paged_attention(*inputs.arrays, **inputs.options | {"decode_only": True}, debug=True)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([16, 32], r"slot_mapping\[1\] must be in \[0, 32\), got 32"),
        ([-1, 3], "got -1"),
        ([17, 17], "slot 17"),
        ([5, 5], ""),
    ],
)
def test_write_kv_names_the_slot(slots, message):
    angles = jnp.zeros((2, 4))
    arrays = (jnp.zeros((2, 1, 3, 8)), angles, angles, jnp.zeros((1, 2, 16, 2, 8)), jnp.array(slots, jnp.int32))
    write = partial(write_kv, *arrays, jnp.zeros(1, jnp.int32), implementation="xla", debug=True)
    if not message:
        write()
        return
    with pytest.raises(ValueError, match=message):
        write()
