"""Against Hugging Face itself, on other prompts than the goldens': runs where torch is installed.

torch is no dependency of jaxpaged, so the ordinary test environment skips this.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import get_family
from tests.models.golden_cases import CASES, read_golden
from tests.models.paged import QUICK_COMPILE, assemble_params, dense_logits

torch = pytest.importorskip("torch", reason="compares with Hugging Face's models, which need torch")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_live_model(name: str):
    from tests.models.make_goldens import hf_logits, hf_model  # imports torch

    case, golden = CASES[name], read_golden(name)
    model = hf_model(case.config)
    np.testing.assert_allclose(hf_logits(model, golden.token_ids), golden.logits, atol=2e-5)  # not stale

    family = get_family(case.config["model_type"])
    config = family.config_from_hf(case.config)
    config = config if case.context_len is None else config.for_context(case.context_len)
    module = family.module(config=config, dtype=jnp.float32)
    run = jax.jit(partial(dense_logits, module), compiler_options=QUICK_COMPILE)
    params = assemble_params(config, golden.tensors())
    rng = np.random.default_rng(7)
    for _ in range(3):
        ids = rng.integers(0, config.vocab_size, case.prompt_len).astype(np.int32)
        np.testing.assert_allclose(run(params, ids), hf_logits(model, ids), atol=1e-4)
