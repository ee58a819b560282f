"""Programs on disk: found again, made anew where they do not fit, never read where another user could write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.device import program_store
from jaxpaged.device.compilation import compilations, use_persistent_cache
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.runner import Runner
from tests.device.by_hand import VOCAB, make_request, make_step, prompt

ARGUMENTS = (jax.ShapeDtypeStruct((4,), jnp.float32), {"b": jax.ShapeDtypeStruct((), jnp.int32)})


class Sum(NamedTuple):
    values: jax.Array
    others: tuple[jax.Array, ...]


class Outer:
    class Inner(NamedTuple):
        value: jax.Array
        missing: None


class Maker:
    """Lowers a small program, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> jax.stages.Lowered:
        self.times += 1

        def add(a: jax.Array, b: dict[str, jax.Array]) -> tuple[Sum, jax.Array]:
            return Sum(a + b["b"], (a,)), a

        return jax.jit(add, donate_argnums=0).lower(*ARGUMENTS)


@pytest.fixture(autouse=True)
def no_jax_cache() -> Iterator[None]:
    """JAX's own cache, which other tests may have turned on, is off."""
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: jax.config.values[name] for name in [*names, "jax_persistent_cache_min_entry_size_bytes"]}
    use_persistent_cache("")
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def maker() -> Maker:
    return Maker()


def get(folder: Path | None, maker: Maker, name: str = "add", arguments=ARGUMENTS, made_of: str = "") -> None:
    """The program does what it should, wherever it is from."""
    program = ProgramStore(folder, made_of).program(name, arguments, maker)
    sums, same = program(jnp.arange(4.0), {"b": np.int32(2)})
    assert isinstance(sums, Sum)
    np.testing.assert_array_equal(sums.values, [2, 3, 4, 5])
    np.testing.assert_array_equal(same, [0, 1, 2, 3])


def files(folder: Path) -> list[Path]:
    return list((folder / "ahead-of-time").iterdir())


def test_a_program_is_compiled_once_and_then_found(tmp_path, maker):
    get(tmp_path, maker)
    before = compilations.count
    get(tmp_path, maker)
    assert maker.times == 1 and len(files(tmp_path)) == 1
    assert compilations.count == before + 1, "reading one takes time: a step that does it stalls"


def test_whatever_it_depends_on_makes_it_another_one(tmp_path, maker, monkeypatch):
    get(tmp_path, maker)
    get(tmp_path, maker, name="add more")
    get(tmp_path, maker, made_of="another model")
    monkeypatch.setenv("XLA_FLAGS_OF_A_TEST", "1")
    get(tmp_path, maker)
    monkeypatch.setattr(program_store, "_surroundings", lambda: "another machine, or other sources")
    get(tmp_path, maker)
    assert maker.times == 5 == len(files(tmp_path))


def test_every_file_of_ours_is_a_part_of_the_key(tmp_path, monkeypatch):
    class Package:
        __path__ = (str(tmp_path),)

    monkeypatch.setattr(program_store, "pallas_kernels", Package)
    digests = {program_store._sources()}
    (tmp_path / "tuned").mkdir()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("tuned/a.json", "{}")):
        (tmp_path / name).write_text(text)
        digests.add(program_store._sources())
    assert len(digests) == 5


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:40] + b"?" + x[41:]])
def test_a_damaged_file_is_written_anew(tmp_path, maker, damage):
    get(tmp_path, maker)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    get(tmp_path, maker)
    get(tmp_path, maker)
    assert maker.times == 2 and file.stat().st_size == pytest.approx(len(whole), rel=0.1)


def test_nothing_is_read_from_a_folder_that_others_can_write(tmp_path, maker):
    get(tmp_path, maker)
    (tmp_path / "ahead-of-time").chmod(0o777)
    get(tmp_path, maker)
    assert maker.times == 2


def test_nothing_is_read_through_a_link(tmp_path, maker):
    get(tmp_path, maker)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ahead-of-time").symlink_to(tmp_path / "ahead-of-time")
    get(tmp_path / "other", maker)
    assert maker.times == 2


def test_without_a_folder_all_is_compiled(maker):
    get(None, maker)
    get(None, maker)
    assert maker.times == 2


@pytest.fixture
def jax_cache(tmp_path) -> None:
    """JAX's own cache, turned on in a folder of its own."""
    use_persistent_cache(str(tmp_path / "jax"))
    compilation_cache.reset_cache()


def test_an_upgrade_that_leaves_programs_alone_keeps_them_too(tmp_path, jax_cache, maker, monkeypatch):
    """JAX's own cache does not answer: XLA:CPU cannot write a program whole that it has read."""
    get(tmp_path, maker)
    monkeypatch.setattr(program_store, "_surroundings", lambda: "another version of our sources")
    hits = compilations.cache_hits
    get(tmp_path, maker)
    assert maker.times == 2 == len(files(tmp_path)) and compilations.cache_hits == hits
    get(tmp_path, maker)
    assert maker.times == 2, "and the next start finds it"


def test_what_jax_had_cached_is_not_kept(tmp_path, jax_cache, maker):
    """Where only our files were removed: then JAX's own cache has it."""
    get(tmp_path, maker)
    files(tmp_path)[0].unlink()
    get(tmp_path, maker)
    assert maker.times == 2 and not files(tmp_path)


def test_results_of_any_tuples_are_found(tmp_path):
    """None and classes in classes too."""
    made: list[int] = []

    def lower() -> jax.stages.Lowered:
        made.append(1)
        return jax.jit(lambda x: (Outer.Inner(x + 1, None), None)).lower(jnp.zeros(2))

    for _ in range(2):
        inner, nothing = ProgramStore(tmp_path).program("nested", (jnp.zeros(2),), lower)(jnp.zeros(2))
        assert isinstance(inner, Outer.Inner) and inner.missing is nothing is None
        np.testing.assert_array_equal(inner.value, [1, 1])
    assert len(made) == 1


def test_a_second_start_compiles_nothing(runner, tmp_path, monkeypatch):
    """All programs of a runner are found, and do the same."""
    make = lambda: Runner(  # noqa: E731
        runner.module, runner.params, runner.config, vocab_size=VOCAB, buckets=runner.buckets, cache=tmp_path
    )
    first = make()
    first.warm_up()
    monkeypatch.setattr(program_store, "compile_step", None)
    second = make()
    second.warm_up()
    assert second.num_programs == first.num_programs == runner.num_programs == len(files(tmp_path))
    step = lambda r: r.launch(make_step([(make_request(r, prompt(9)), 0, 9)]))  # noqa: E731
    assert second.collect(step(second)) == runner.collect(step(runner))
