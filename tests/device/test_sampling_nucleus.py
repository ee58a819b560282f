"""top-k, top-p and min-p against sorting, where logits are equal, flat, or nearly nothing."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.device.nucleus import Limits, comes_before, exceeds, kept, last_kept, needed_mass
from tests.device import sampling_cases as cases

SIZE = 160  # more than `nucleus.FEW`, so that both ways of finding the k-th are taken


@jax.jit
def keep(logits, temperature, top_k, top_p, min_p):
    """Mask of the kept tokens, and token by token whether each is one."""
    limits = Limits(
        peak=jnp.max(logits),
        temperature=temperature,
        top_k=jnp.where(top_k == 0, SIZE, jnp.minimum(top_k, SIZE)),
        top_p=top_p,
        floor=jnp.log(min_p),
        uses_top_k=jnp.bool_(True),
        uses_top_p=jnp.bool_(True),
    )
    needed = needed_mass(logits, limits)
    exceeding = jax.lax.map(lambda token: exceeds(logits, token, limits, needed), jnp.arange(SIZE))
    return kept(logits, limits, last_kept(logits, limits)), ~exceeding & (logits > -jnp.inf)


few_values = st.lists(st.integers(-3, 3), min_size=SIZE, max_size=SIZE).map(lambda x: np.array(x, np.float32))
seeds = st.integers(0, 2**32 - 1)
normal = seeds.map(lambda seed: np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) * 4)
flat = st.just(np.zeros(SIZE, np.float32))
signed_zeros = seeds.map(lambda seed: np.random.default_rng(seed).choice(np.array([0.0, -0.0], np.float32), SIZE))
wide = seeds.map(lambda seed: np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) * np.float32(1e30))
all_logits = st.one_of(few_values, normal, flat, signed_zeros, wide)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    logits=all_logits,
    banned=st.floats(0, 0.99),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 50, 127, 128, 129, 150, SIZE]),
    top_p=st.sampled_from([1e-9, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_kept_tokens(logits, banned, temperature, top_k, top_p, min_p):
    logits = np.where(np.random.default_rng(1).random(SIZE) < banned, np.float32(-np.inf), logits)
    logits[SIZE // 2] = 0.0
    args = (np.float32(x) for x in (temperature, top_p, min_p))
    temperature32, top_p32, min_p32 = args
    mask, one_by_one = (np.asarray(x) for x in keep(logits, temperature32, np.int32(top_k), top_p32, min_p32))
    params = SamplingParams(temperature=float(temperature32), top_k=top_k, top_p=float(top_p32), min_p=float(min_p32))
    check_kept(logits, params, set(np.flatnonzero(mask).tolist()))
    check_kept(logits, params, set(np.flatnonzero(one_by_one).tolist()))


def check_kept(logits: np.ndarray, params: SamplingParams, got: set[int]) -> None:
    """Exactly the tokens that sorting keeps; of the mass 1e-6 may be rounding."""
    expected = cases.kept(logits, params)
    if got == set(expected):
        return
    bounds = (params.top_p * (1 - 1e-6), min(params.top_p * (1 + 1e-6), 1 - 1e-12))
    less, more = (cases.kept(logits, msgspec.structs.replace(params, top_p=top_p)) for top_p in bounds)
    assert params.top_p < 1 and set(less) <= got <= set(more), (sorted(got), sorted(expected))
    assert got == set(cases.kept(logits, SamplingParams())[: len(got)]), "not a prefix of the order"


def test_flat_logits_of_a_whole_vocabulary():
    """Counts beyond what a float32 sum of rounded probabilities could tell."""
    size = 128_256
    logits = jnp.zeros(size)
    limits = Limits(*(jnp.asarray(x) for x in (0.0, 1.0, size, np.float32(0.9), -np.inf, False, True)))
    needed = needed_mass(logits, limits)
    last = int(np.ceil(float(np.float32(0.9)) * size)) - 1
    assert [bool(exceeds(logits, jnp.int32(t), limits, needed)) for t in (0, last, last + 1)] == [0, 0, 1]


def test_order_is_by_logit_then_id():
    logits = jnp.array([1.0, 3.0, 1.0, 2.0, 1.0])
    assert comes_before(logits, jnp.int32(2)).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize(("size", "top_k", "rows"), [(1000, 500, 100), (1000, 1000, 50), (20_000, 300, 20)])
def test_nearly_all_of_the_mass_is_never_nothing(size, top_k, rows):
    """By rounding the mass that top-p needs may be more than the sum of all that top-k keeps."""
    top_p = np.nextafter(np.float32(1), np.float32(0))
    given = {"top_k": top_k, "top_p": top_p, "floor": -np.inf, "uses_top_k": top_k < size, "uses_top_p": True}
    logits = np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])  # equals, too

    def keep_row(x):
        limits = Limits(jnp.max(x), jnp.float32(1), **{name: jnp.asarray(value) for name, value in given.items()})
        return kept(x, limits, last_kept(x, limits))

    masks = np.asarray(jax.jit(lambda x: jax.lax.map(keep_row, x))(logits))
    for row, mask in zip(logits, masks, strict=True):
        order = np.argsort(-row, kind="stable")
        count = mask.sum()
        assert set(np.flatnonzero(mask)) == set(order[:count]) and count <= top_k
        weights = np.exp(row[order[:top_k]].astype(np.float64))
        assert weights[:count].sum() > (1 - 1e-5) * weights.sum()
