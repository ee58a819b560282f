"""From tensors to params: everything once, every mismatch at once, little memory."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged import models
from jaxpaged.checkpoint.load import load_params
from jaxpaged.checkpoint.source import open_model
from jaxpaged.checkpoint.table import CheckpointTable, Weight
from jaxpaged.errors import CheckpointError
from tests.checkpoint.files import CONFIG, lazy, rng_array

ROOT = Path(__file__).parents[2]


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(tensors):
    return np.concatenate(tensors, axis=0)


TABLE = CheckpointTable(
    weights=(
        Weight("embed", ("e",)),
        Weight("layer/qkv", ("q", "k"), rows),
        Weight("layer/norm", ("n",), lambda t: t[0] + 1),
    ),
    ignored=(r"inv_freq$",),
)
ABSTRACT = {"embed": struct(4, 3), "layer": {"qkv": struct(5, 3), "norm": struct(3)}}


@pytest.fixture
def arrays():
    shapes = {"e": (4, 3), "q": (3, 3), "k": (2, 3), "n": (3,)}
    return {name: rng_array(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def lazily(arrays):
    return {name: lazy(array) for name, array in arrays.items()}


def test_parameters_are_assembled_and_cast(arrays):
    params = load_params(TABLE, ABSTRACT, lazily(arrays), dtype="bfloat16")
    expected = {
        "embed": arrays["e"],
        "layer": {"qkv": rows([arrays["q"], arrays["k"]]), "norm": arrays["n"].astype(ml_dtypes.bfloat16) + 1},
    }
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(np.asarray(got), want.astype(ml_dtypes.bfloat16))
    assert jax.tree.structure(params) == jax.tree.structure(expected)


def test_without_dtype_the_model_decides(arrays):
    abstract = {"embed": struct(4, 3, dtype=jnp.bfloat16), "layer": ABSTRACT["layer"]}
    params = load_params(TABLE, abstract, lazily(arrays), dtype=None)
    assert params["embed"].dtype == jnp.bfloat16
    assert params["layer"]["qkv"].dtype == jnp.float32


def test_integers_keep_their_dtype():
    table, ids = CheckpointTable((Weight("ids", ("ids",)),)), np.arange(3, dtype=np.int8)
    params = load_params(table, {"ids": struct(3, dtype=jnp.int8)}, {"ids": lazy(ids)}, dtype="bfloat16")
    assert params["ids"].dtype == jnp.int8


def test_put_gets_each_parameter_once_and_owns_it(arrays):
    calls = []
    params = load_params(
        TABLE, ABSTRACT, lazily(arrays), dtype="float32", put=lambda path, array: calls.append((path, array)) or path
    )
    assert [path for path, _ in calls] == ["embed", "layer/qkv", "layer/norm"]
    assert all(array.flags.writeable and array.flags.c_contiguous for _, array in calls)
    assert params == {"embed": "embed", "layer": {"qkv": "layer/qkv", "norm": "layer/norm"}}


def test_progress_counts_bytes_of_the_parameters(arrays):
    seen = []
    load_params(TABLE, ABSTRACT, lazily(arrays), dtype="bfloat16", progress=lambda *x: seen.append(x))
    assert seen == [(0, 60), (24, 60), (54, 60), (60, 60)]


def test_every_mismatch_is_told_at_once_and_nothing_is_read(arrays):
    tensors = lazily(arrays | {"extra.1": arrays["e"], "extra.2": arrays["e"], "rotary.inv_freq": arrays["n"]})
    del tensors["q"], tensors["n"]
    tensors["e"] = lazy(rng_array((4, 7)))
    for tensor in tensors.values():
        object.__setattr__(tensor, "read", lambda: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError) as caught:
        load_params(TABLE, ABSTRACT, tensors, dtype="float32")
    error = caught.value
    assert error.missing == ("q", "n")
    assert error.unused == ("extra.1", "extra.2")
    assert error.misshaped == ("e [4, 7]: makes embed [4, 7], the model wants [4, 3]",)
    assert all(name in str(error) for name in ("q", "n", "extra.1", "extra.2", "[4, 7]"))


def test_sources_that_do_not_fit_together(arrays):
    with pytest.raises(CheckpointError) as caught:
        load_params(TABLE, ABSTRACT, lazily(arrays | {"k": rng_array((2, 9))}), dtype="float32")
    (told,) = caught.value.misshaped
    assert told.startswith("q [3, 3], k [2, 9]: cannot make layer/qkv [5, 3]")


def test_shapes_after_computing_are_checked_too(arrays):
    with pytest.raises(CheckpointError, match=r"n \[4\]: makes layer/norm \[4\]"):
        load_params(TABLE, ABSTRACT, lazily(arrays | {"n": rng_array((4,))}), dtype="float32")


def test_table_and_model_must_agree(arrays):
    with pytest.raises(CheckpointError, match=r"layer/bias \(not in the model's table\)"):
        load_params(
            TABLE, ABSTRACT | {"layer": ABSTRACT["layer"] | {"bias": struct(1)}}, lazily(arrays), dtype="float32"
        )
    twice = CheckpointTable((*TABLE.weights, Weight("embed", ("e",)), Weight("other", ("e",))), TABLE.ignored)
    with pytest.raises(CheckpointError, match=r"(?s)embed is declared twice.*other is declared"):
        load_params(twice, ABSTRACT, lazily(arrays), dtype="float32")


def test_params_do_not_change_with_the_file(tmp_path):
    """On a CPU, JAX would keep a view of an aligned mapping."""
    array = rng_array((1024, 64))
    path = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"e": array}, path)
    table = CheckpointTable((Weight("e", ("e",)),))
    params = load_params(table, {"e": struct(1024, 64)}, open_model(tmp_path).tensors(), dtype="float32")
    with path.open("r+b") as file:
        file.seek(-array.nbytes, os.SEEK_END)
        file.write(bytes(array.nbytes))
    np.testing.assert_array_equal(np.asarray(params["e"]), array)


# B70


def llama_folder(folder, *, tie, head, nested=False):
    config = CONFIG | {"tie_word_embeddings": tie}
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
    if head:
        shapes["lm_head.weight"] = (32, 8)
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {prefix + "input_layernorm.weight": (8,), prefix + "post_attention_layernorm.weight": (8,)}
        shapes |= {prefix + f"self_attn.{n}_proj.weight": (s, 8) for n, s in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        shapes |= {prefix + f"mlp.{n}_proj.weight": (16, 8) for n in ("gate", "up")}
        shapes[prefix + "mlp.down_proj.weight"] = (8, 16)
    tensors = {name: rng_array(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def load_folder(folder):
    found = open_model(folder)
    family = models.get_family(found.config["model_type"])
    config = family.config_from_hf(found.config)
    abstract = models.abstract_params(family.module(config=config, dtype=jnp.float32))
    paths = []

    def put(path, array):
        paths.append(path)
        return jax.device_put(array)

    params = load_params(family.table(config), abstract, found.tensors(), dtype="float32", put=put)
    assert len(paths) == len(set(paths)) == len(jax.tree.leaves(abstract))
    return params


@pytest.mark.parametrize(("tie", "head"), [(True, False), (True, True), (False, True)])
def test_tied_and_untied_heads(tmp_path, tie, head):
    tensors = llama_folder(tmp_path, tie=tie, head=head)
    params = load_folder(tmp_path)
    np.testing.assert_array_equal(np.asarray(params["embed"]), tensors["model.embed_tokens.weight"])
    assert ("lm_head" in params) == (not tie)
    if not tie:
        np.testing.assert_array_equal(np.asarray(params["lm_head"]), tensors["lm_head.weight"])


def test_untied_head_that_is_missing(tmp_path):
    llama_folder(tmp_path, tie=False, head=False)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load_folder(tmp_path)


def test_demo_loads_whole():
    found = open_model("demo")
    family = models.get_family("llama")
    config = family.config_from_hf(found.config)
    abstract = models.abstract_params(family.module(config=config, dtype=jnp.bfloat16))
    params = load_params(family.table(config), abstract, found.tensors(), dtype="bfloat16")
    host = jax.tree.map(np.asarray, params)
    assert sum(x.size for x in jax.tree.leaves(host)) == 134_515_008
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(host))
    # Spread as weights are; a wrong block format or a shift by a byte gives something else.
    deviations = {p: host["layers_7"]["mlp"][p].astype(np.float32).std() for p in ("gate_up", "down")}
    assert all(0.05 < value < 0.3 for value in deviations.values()), deviations


MEMORY = """
    import os, sys, threading, time
    import jax, jax.numpy as jnp
    from jaxpaged.checkpoint.load import load_params
    from jaxpaged.checkpoint.source import open_model
    from jaxpaged.checkpoint.table import CheckpointTable, Weight

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    jax.device_put(jnp.zeros(8)).block_until_ready()
    tensors = open_model(sys.argv[1]).tensors()
    shapes = {name: t.shape for name, t in tensors.items()}
    abstract = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    table = CheckpointTable(tuple(Weight(name, (name,)) for name in shapes))
    before, peak, done = resident(), 0, threading.Event()

    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = load_params(table, abstract, tensors, dtype=sys.argv[2])
    done.set()
    watcher.join()
    size = sum(x.nbytes for x in params.values())
    print(size, (max(peak, resident()) - before) / size)
"""


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [("bfloat16", "bfloat16"), pytest.param("float32", "bfloat16", marks=pytest.mark.slow)],
)
def test_host_memory_stays_under_1_3_times_the_model(tmp_path, stored, loaded):
    """Peak resident memory above what Python and JAX hold before, the loaded model (on the CPU) included."""
    array = rng_array((1024, 4096)).astype(stored)
    save_file({f"w{i:02d}": array for i in range(36)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path), loaded],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    size, ratio = re.fullmatch(r"(\d+) ([\d.]+)", done.stdout.strip()).groups()
    assert int(size) == 36 * 1024 * 4096 * 2
    assert 0.9 < float(ratio) < 1.3
