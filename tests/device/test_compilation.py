"""The counter must count: every test that says "nothing compiled" rests on it."""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.device.compilation import compilations, use_persistent_cache


def test_each_new_program_counts_once():
    before = compilations.count
    f = jax.jit(lambda x: x * 3 + 41)
    f(jnp.zeros(7))
    assert compilations.count >= before + 1
    before = compilations.count
    f(jnp.zeros(7))
    assert compilations.count == before


def test_other_threads_do_not_count():
    x = jnp.zeros(5)
    before = compilations.count
    thread = threading.Thread(target=lambda: jax.jit(lambda x: x * 5 + 43)(x))
    thread.start()
    thread.join()
    assert compilations.count == before


@pytest.fixture
def restored() -> Iterator[None]:
    """JAX's options are as before afterwards."""
    names = ["jax_compilation_cache_dir", "jax_enable_compilation_cache"]
    names += ["jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"]
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_folder(tmp_path, restored):
    assert use_persistent_cache(str(tmp_path)) == tmp_path
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    assert use_persistent_cache(None) == tmp_path, "what is set already stays"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    assert use_persistent_cache("") is None
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_bucket_is_left_to_jax(restored):
    assert use_persistent_cache("gs://bucket/programs") is None
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/programs"
    assert use_persistent_cache(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/programs"


def test_nothing_is_kept_where_jax_keeps_nothing(tmp_path, restored):
    """JAX_ENABLE_COMPILATION_CACHE=false means every program."""
    jax.config.update("jax_enable_compilation_cache", False)
    assert use_persistent_cache(str(tmp_path)) is None
