"""Every family equals Hugging Face within 1e-4 in float32 through the paged path, however the prompt is cut up."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import abstract_params, get_family
from jaxpaged.models.config import ModelConfig
from tests.models.golden_cases import CASES, read_golden
from tests.models.paged import QUICK_COMPILE, PagedModel, assemble_params, dense_logits

CHUNKS = (2, 1, 16, 1, 7, 13)


def golden_config(name: str) -> ModelConfig:
    case = CASES[name]
    config = get_family(case.config["model_type"]).config_from_hf(case.config)
    return config if case.context_len is None else config.for_context(case.context_len)


def run_interleaved(model: PagedModel, token_ids: np.ndarray) -> list[np.ndarray]:
    """Logits of two sequences with the same tokens, cut up differently, in shared steps."""
    parts: dict[int, list[np.ndarray]] = {0: cut(token_ids, CHUNKS), 1: cut(token_ids, CHUNKS[::-1])}
    logits: dict[int, list[np.ndarray]] = {0: [], 1: []}
    while any(parts.values()):
        chunks = [(sequence, queue.pop(0)) for sequence, queue in parts.items() if queue]
        chunks.sort(key=lambda chunk: len(chunk[1]) > 1)  # one-token rows first
        for (sequence, _), answer in zip(chunks, model.feed(chunks), strict=True):
            logits[sequence].append(answer)
    return [np.concatenate(rows) for rows in logits.values()]


def cut(token_ids: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return [part for part in np.split(token_ids, np.cumsum(lengths)) if len(part)]


def assert_close(actual: np.ndarray, golden: np.ndarray) -> None:
    np.testing.assert_allclose(actual, golden, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name: str):
    golden = read_golden(name)
    config = golden_config(name)
    module = get_family(config.model_type).module(config=config, dtype=jnp.float32)
    params = assemble_params(config, golden.tensors())
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, abstract_params(module))
    model = PagedModel(module, params, tokens=48)
    ids = golden.token_ids

    (whole,) = model.feed([(0, ids)])
    assert_close(whole, golden.logits)

    model.restart()
    for chunked in run_interleaved(model, ids):
        assert_close(chunked, golden.logits)

    if CASES[name].variant:
        return
    model.restart()
    single = [model.feed([(0, ids[i : i + 1])], decode=True)[0] for i in range(len(ids))]
    assert_close(np.concatenate(single), golden.logits)

    dense = jax.jit(partial(dense_logits, module), compiler_options=QUICK_COMPILE)(params, ids)
    assert_close(np.asarray(dense), golden.logits)
