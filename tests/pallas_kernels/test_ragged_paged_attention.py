"""Every implementation against the reference, on the named cases and on drawn batches; and what is refused."""

import functools
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ragged_paged_attention, tuning
from pallas_kernels.checks import best_implementation
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, Inputs, make_inputs

IMPLEMENTATIONS = ("xla", "gpu", "tpu")
LACKS = {
    ("tpu", "page_128_head_dim_128_float16"): "float16",
}
"""What an implementation says of the cases that it lacks."""

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def run(inputs: Inputs, implementation: str, **changes) -> np.ndarray:
    options = {**inputs.options, **changes, "implementation": implementation, "interpret": True}
    out = ragged_paged_attention(*inputs.arrays, **options)
    assert out.dtype == inputs.arrays[0].dtype
    return np.asarray(out, np.float32)


def assert_agrees(case: Case, seed: int, implementation: str) -> None:
    inputs = make_inputs(case, seed)
    want, got = run(inputs, "reference"), run(inputs, implementation)
    assert np.isfinite(want).all()
    owned = sum(q_len for q_len, _ in case.rows)
    assert not want[owned:].any() and not got[owned:].any(), "padding tokens are zero"
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, implementation):
    if (implementation, name) in LACKS:
        with pytest.raises(NotImplementedError, match=LACKS[implementation, name]):
            run(make_inputs(CASES[name], seed=0), implementation)
        return
    assert_agrees(CASES[name], zlib.crc32(name.encode()), implementation)


@pytest.mark.parametrize("page_size", [16, 128])
def test_shared_keys_under_every_option(page_size):
    """What the xla implementation reads once for many rows: 5 of 9 here, which share 128 tokens."""
    case = Case(
        rows=((1, 130), (1, 129), (1, 300), (0, 200), (1, 257), (1, 256), (1, 300), (1, 5), (1, 128)),
        page_size=page_size,
        heads=6,
        head_dim=80,
        dtype="bfloat16",
        pool_dtype="uint16",
        soft_cap=5.0,
        sinks=True,
        k_scale=0.5,
        v_scale=1.5,
        decode_only=True,
        shared=((1, 0, 128), (2, 0, 128), (4, 0, 128), (5, 0, 128), (6, 2, 256), (8, 7, 128)),
    )
    assert_agrees(case, 3, "xla")


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 70, "sinks": True, "v_scale": 1.5}], ids=["plain", "window"]
)
@pytest.mark.parametrize("kv_len", [0, 1, 63, 64, 65, 128, 400])
def test_a_program_for_one_row(kv_len, options):
    """It has a loop of its own in the xla implementation. Without a row its output is zero."""
    rows = ((1, kv_len),) if kv_len else ()
    case = Case(rows=rows, tokens=1, num_rows=1, max_pages=30, num_pages=40, decode_only=True, **options)
    assert_agrees(case, kv_len, "xla")


@st.composite
def batches(draw) -> tuple[tuple[int, int], ...]:
    """Up to 12 rows of up to 288 tokens in all, decodes first, in 71 pages of 16."""
    decodes = draw(st.lists(st.integers(1, 90), max_size=6))
    longer = draw(st.lists(st.tuples(st.integers(0, 47), st.integers(0, 40)), max_size=6))
    return (*((1, kv_len) for kv_len in decodes), *((q_len, q_len + cached) for q_len, cached in longer))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=10, deadline=None)
@given(batches(), st.integers(0, 2**32 - 1))
def test_agrees_on_drawn_batches(implementation, rows, seed):
    assert_agrees(replace(CASES["mixed"], rows=rows), seed, implementation)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Plain causal attention of one row in float64; q [q_len, N, H], k and v [kv_len, K, H]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("tnh,cnh->ntc", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    scores[:, np.arange(len(k)) > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ntc,cnh->tnh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_is_plain_attention_over_the_pages(implementation):
    """The reference itself, against attention written without pages."""
    case = CASES["mixed"]
    inputs = make_inputs(case, seed=5)
    got = run(inputs, implementation)
    q, pool, _, page_indices, cu_q_lens, _, _ = (np.asarray(array) for array in inputs.arrays)
    for row, (q_len, kv_len) in enumerate(case.rows):
        kv = pool[case.layer][page_indices[row, : -(-kv_len // case.page_size)]].reshape(-1, *pool.shape[3:])[:kv_len]
        mine = slice(cu_q_lens[row], cu_q_lens[row] + q_len)
        want = dense(q[mine], kv[:, 0::2], kv[:, 1::2], np.arange(kv_len - q_len, kv_len))
        np.testing.assert_allclose(got[mine], want, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_depend_on_their_neighbours(implementation):
    """A row's output is the same to the bit when its neighbours' keys and values are NaN."""
    case = CASES["decode_many"]
    inputs = make_inputs(case, seed=1)
    want = run(inputs, implementation)
    pool, page_indices = np.array(inputs.arrays[1]), np.asarray(inputs.arrays[3])
    broken = 7
    pool[case.layer, page_indices[broken, : -(-case.rows[broken][1] // case.page_size)]] = np.nan
    got = run(replace(inputs, arrays=(inputs.arrays[0], jnp.asarray(pool), *inputs.arrays[2:])), implementation)
    keep = np.arange(len(case.rows)) != broken
    np.testing.assert_array_equal(got[keep], want[keep])
    assert np.isnan(got[broken]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_page_indices_beyond_a_row_are_ignored(implementation):
    case = CASES["mixed"]
    inputs = make_inputs(case, seed=2)
    want = run(inputs, implementation)
    page_indices = np.array(inputs.arrays[3])
    for row in range(len(page_indices)):
        used = -(-case.rows[row][1] // case.page_size) if row < len(case.rows) else 0
        page_indices[row, used:] = -(2**31) if row % 2 else 2**31 - 1
    arrays = (*inputs.arrays[:3], jnp.asarray(page_indices), *inputs.arrays[4:])
    got = run(replace(inputs, arrays=arrays), implementation)
    np.testing.assert_array_equal(got, want)


POSITIONS = {"q": 0, "kv_pages": 1, "kv_lens": 2, "page_indices": 3, "cu_q_lens": 4, "num_seqs": 5, "layer": 6}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", None, "q must be an array, got None"),
        ("page_indices", [[1]], r"page_indices must be an array, got \[\[1\]\]"),
        ("q", jnp.zeros((5, 4)), r"\(5, 4\)"),
        ("q", jnp.zeros((5, 4, 64), jnp.int32), "int32"),
        ("q", jnp.zeros((5, 4, 32)), "32 and 64"),
        ("q", jnp.zeros((5, 3, 64)), "3 and 2"),
        ("kv_pages", jnp.zeros((2, 9, 16, 4 * 64)), r"\(2, 9, 16, 256\)"),
        ("kv_pages", jnp.zeros((2, 9, 12, 4, 64)), "12"),
        ("kv_pages", jnp.zeros((2, 9, 16, 3, 64)), "3"),
        ("kv_pages", jnp.zeros((2, 9, 16, 4, 64), jnp.int32), "int32"),
        ("kv_lens", jnp.zeros((5,), jnp.float32), "float32"),
        ("kv_lens", jnp.zeros((5, 1), jnp.int32), r"\(5, 1\)"),
        ("page_indices", jnp.zeros((4, 7), jnp.int32), r"\(4, 7\)"),
        ("cu_q_lens", jnp.zeros((5,), jnp.int32), r"\(6,\), got \(5,\)"),
        ("num_seqs", jnp.zeros((), jnp.int32), r"\(\)"),
        ("layer", 0, "layer must be an array, got 0"),
        ("sm_scale", float("nan"), "nan"),
        ("sm_scale", 10**400, "1000"),
        ("sm_scale", True, "True"),
        ("sliding_window", 0, "0"),
        ("sliding_window", True, "True"),
        ("sliding_window", 2**31, "2147483648"),
        ("decode_only", "yes", "'yes'"),
        ("soft_cap", -1.0, "-1.0"),
        ("sinks", jnp.zeros((3,)), r"\(3,\)"),
        ("k_scale", jnp.ones((2,)), r"k_scale must be a number or an array of one, got Array\(\[1., 1.\]"),
        ("v_scale", "1", "'1'"),
        ("implementation", "cuda", "'cuda'"),
    ],
)
def test_bad_arguments_are_refused_by_value(name, value, message):
    inputs = make_inputs(CASES["many_queries_in_a_decode_shape"], seed=0)
    arrays, options = list(inputs.arrays), dict(inputs.options)
    if name in POSITIONS:
        arrays[POSITIONS[name]] = value
    else:
        options[name] = value
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(*arrays, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scales_may_be_arrays(implementation):
    inputs = make_inputs(CASES["decode"], seed=0)
    want = run(inputs, "reference", k_scale=0.5, v_scale=3.0)
    for shape in ((), (1,), (1, 1)):
        got = run(inputs, implementation, k_scale=jnp.full(shape, 0.5), v_scale=jnp.full(shape, 3.0, jnp.bfloat16))
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_64_bits_as_the_default_change_nothing(implementation):
    inputs = make_inputs(CASES["mixed"], seed=0)
    want = run(inputs, implementation)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(inputs, implementation), want)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_pools_that_triton_would_address_wrongly_are_refused(dtype):
    """By shapes alone: 3 * 2^30 numbers of one byte."""
    arrays = list(make_inputs(CASES["mixed"], seed=0).arrays)
    attend = functools.partial(ragged_paged_attention, sm_scale=1.0, implementation="gpu")
    for size, refused in ((2**31, False), (3 * 2**30, True), (2**32, True), (2**32 + 2**20, False)):
        arrays[1] = jax.ShapeDtypeStruct((2, size // 2**13, 16, 4, 64), dtype)
        if refused:
            with pytest.raises(NotImplementedError, match=str(size)):
                jax.eval_shape(attend, *arrays)
        else:
            jax.eval_shape(attend, *arrays)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        ("NVIDIA H200", "gpu"),
        ("TPU v6 lite", "tpu"),
        ("cpu", "xla"),
        ("AMD Instinct MI300X", "xla"),
        ("Tesla T4", "xla"),
    ],
)
def test_the_best_implementation_follows_the_device(kind, implementation):
    with tuning.device(kind):
        assert best_implementation() == implementation


@pytest.mark.parametrize("implementation", ["gpu_hopper"])
def test_missing_implementations_are_named(implementation):
    inputs = make_inputs(CASES["many_queries_in_a_decode_shape"], seed=0)
    with pytest.raises(NotImplementedError, match=implementation):
        run(inputs, implementation)


def test_a_decode_program_has_loops_over_keys_alone():
    """T == S leaves the loop over tiles of queries out, and those over keys in it; what many rows share has its own."""
    inputs = make_inputs(CASES["decode"], seed=0)
    loops = {}
    for decode_only in (None, True, False):
        op = functools.partial(ragged_paged_attention, **inputs.options, implementation="xla", decode_only=decode_only)
        loops[decode_only] = jax.make_jaxpr(op)(*inputs.arrays).pretty_print().count("= while[")
    assert loops == {None: 2, True: 2, False: 4}
