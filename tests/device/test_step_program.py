"""How a step is compiled."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.device.step_program import compile_step


def test_options_that_xla_does_not_know_are_left_out_with_a_warning():
    x = jnp.ones(3)
    lowered = jax.jit(lambda x: x + 1).lower(x)
    with pytest.warns(UserWarning, match="without xla_gpu_no_such_thing"):
        compiled = compile_step(lowered, {"xla_gpu_no_such_thing": "1"})
    assert compiled(x)[0] == 2


def test_other_errors_are_not_hidden():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_step(lowered, {"xla_gpu_experimental_force_split_k": "no number"})
