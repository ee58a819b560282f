"""The counter must count: every test that says "nothing compiled" rests on it."""

import threading

import jax
import jax.numpy as jnp

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


def test_the_cache_folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        use_persistent_cache(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        use_persistent_cache(None)  # what is set already stays
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        use_persistent_cache("")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
