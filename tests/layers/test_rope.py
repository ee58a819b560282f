"""Rotary embeddings equal Hugging Face's for every scaling and spelling (B67)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.errors import ModelError
from jaxpaged.layers.rope import RopeConfig, apply_rope, rope_angles, rope_from_hf, with_context_len
from tests.layers.rope_cases import CASES, RopeCase, read_goldens

GOLDENS = read_goldens()


def old_spelling(case: RopeCase) -> dict[str, Any]:
    return {"rope_theta": case.theta, "rope_scaling": case.rope, "partial_rotary_factor": case.partial}


def new_spelling(case: RopeCase) -> dict[str, Any]:
    """As transformers 5 writes it: everything in `rope_parameters`, under "rope_type"."""
    rope = dict(case.rope or {})
    kind = rope.pop("type", None) or rope.get("rope_type", "default")
    parameters = {**rope, "rope_type": kind, "rope_theta": case.theta, "partial_rotary_factor": case.partial}
    return {"rope_parameters": parameters}


def read(case: RopeCase, hf: dict[str, Any]) -> RopeConfig:
    return rope_from_hf(hf, head_dim=case.head_dim, max_position_embeddings=case.max_position_embeddings)


@pytest.mark.parametrize("spelling", [old_spelling, new_spelling])
@pytest.mark.parametrize(("name", "length"), [(name, n) for name, case in CASES.items() for n in case.lengths])
def test_frequencies_equal_hugging_face(name: str, length: int, spelling: Any):
    case = CASES[name]
    rope = with_context_len(read(case, spelling(case)), length)
    inv_freq, factor = rope.frequencies()
    golden, golden_factor = GOLDENS[name][length]
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, golden, rtol=2e-6)  # closer than 1e-5: all are at most 1
    assert factor == pytest.approx(golden_factor, abs=1e-6)


@pytest.mark.parametrize("name", ["llama3", "yarn", "longrope"])
def test_angles_equal_hugging_face(name: str):
    case = CASES[name]
    length = case.lengths[-1]
    rope = with_context_len(read(case, old_spelling(case)), length)
    inv_freq, factor = GOLDENS[name][length]
    for position in (0, 100, 8192 + 100):
        cos, sin = rope_angles(rope, jnp.array([position], jnp.int32))
        # Hugging Face's frequencies are float32 throughout: their last bit grows with the position.
        tolerance = 1e-5 + 2e-7 * position
        angle = position * inv_freq.astype(np.float64)
        np.testing.assert_allclose(cos[0], factor * np.cos(angle), atol=tolerance)
        np.testing.assert_allclose(sin[0], factor * np.sin(angle), atol=tolerance)


def test_original_length_at_the_top_level_wins():
    case = CASES["longrope"]
    inside = {**old_spelling(case), "original_max_position_embeddings": 2048}
    assert dict(read(case, inside).parameters)["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_type_is_refused(key: str):
    with pytest.raises(ModelError, match=r"unknown rope type 'mrope'.*llama3"):
        read(CASES["default"], {"rope_scaling": {key: "mrope", "factor": 2.0}})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "'linear' needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'llama3' needs 'high_freq_factor'"),
        ({"type": "longrope", "long_factor": [1.0] * 32}, "'longrope' needs 'short_factor'"),
        ({"type": "longrope", "long_factor": [1.0] * 32, "short_factor": [1.0] * 31}, "'short_factor' has 31 entries"),
        ("linear", "must be an object, not 'linear'"),
    ],
)
def test_incomplete_parameters_are_refused_when_read(rope: Any, message: str):
    with pytest.raises(ModelError, match=message):
        read(CASES["default"], {"rope_scaling": rope})


def test_odd_rotary_dim_is_refused():
    with pytest.raises(ModelError, match=r"rotary dims 19 \(head_dim 64 x 0.3\)"):
        read(CASES["default"], {"partial_rotary_factor": 0.3})


def test_longest_sequence_includes_the_scaling():
    assert read(CASES["default"], {}).max_context_len == 8192
    assert read(CASES["dynamic"], old_spelling(CASES["dynamic"])).max_context_len == 4096
    assert read(CASES["yarn"], old_spelling(CASES["yarn"])).max_context_len == 131072
    short = dataclasses.replace(CASES["yarn"], max_position_embeddings=32768)
    assert read(short, old_spelling(short)).max_context_len == 131072


def test_rotation_pairs_halves_and_leaves_the_rest():
    x = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    angle = np.array([[0.3, 1.2], [2.0, 0.1]], np.float32)
    y = np.asarray(apply_rope(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle)))
    pair = x[..., [0, 1]] + 1j * x[..., [2, 3]]
    turned = pair * np.exp(1j * angle)[:, None, :]
    np.testing.assert_allclose(y[..., [0, 1]], turned.real, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[..., [2, 3]], turned.imag, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
