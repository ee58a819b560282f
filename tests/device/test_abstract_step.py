"""The whole step of a model, compiled for devices that are not there."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.device.abstract_step import CONFIGS, POOL_BYTES, AbstractProgram, abstract_step, hf_config
from jaxpaged.device.slots import Slots
from jaxpaged.device.step_program import compiler_options
from jaxpaged.errors import ConfigError, ModelError, ModelNotFoundError
from pallas_kernels.deviceless import DEVICES, Program, __main__, compile_for
from pallas_kernels.deviceless.report import layer_launches, typical_layer
from tests.compilers import needs_compilers

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KNOWN = tuple(json.loads(CONFIGS.read_text()))
STATE = ("params", "kv_pages", "slots")


def compiled(device: str, step: AbstractProgram) -> Program:
    return compile_for(
        device,
        step.function,
        *step.args,
        donate_argnums=step.donate_argnums,
        compiler_options=step.compiler_options,
        row_major=step.row_major,
        may_spill=step.may_spill,
    )


def state_copies(program: Program, *, above: int = 0) -> list:
    """Copies of weights, KV pages or slots, in whole or in part, of more bytes than `above`."""
    return [copy for copy in program.copies if copy.argument.startswith(STATE) and copy.bytes > above]


@pytest.mark.parametrize("name", KNOWN)
def test_the_well_known_models_have_a_step(name):
    step = abstract_step(name, rows=64)
    params, pool, slots, _ = step.forward.args
    assert POOL_BYTES * 0.99 < pool.size * pool.dtype.itemsize <= POOL_BYTES
    assert pool.shape[0] == step.num_layers == hf_config(name)["num_hidden_layers"]
    assert slots.history.shape[0] == 257
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    size = name.rpartition("-")[2]
    stated = {"mini": 3.8e9}.get(size) or float(size[:-1]) * {"b": 1e9, "m": 1e6}[size[-1]]
    assert 0.95 * stated < count < 1.3 * stated, f"{count:,} parameters"


def test_the_pool_is_stored_as_on_the_platform():
    assert abstract_step(TINY, rows=8, platform="gpu").forward.args[1].dtype == jnp.bfloat16
    assert abstract_step(TINY, rows=8, platform="cpu").forward.args[1].dtype == jnp.uint16
    assert abstract_step(TINY, rows=8, kv_cache_dtype="float16").forward.args[1].dtype == jnp.float16


def test_a_config_is_a_dict_a_file_a_folder_or_a_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert hf_config(str(path)) == hf_config(str(tmp_path)) == hf_config(TINY) == TINY
    path.write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        hf_config(str(path))
    path.write_text("{")
    with pytest.raises(ModelError, match="no JSON"):
        hf_config(str(path))
    with pytest.raises(ModelNotFoundError, match=r"'llama-9'.*llama-3\.1-8b"):
        hf_config("llama-9")


def test_fewer_layers():
    assert abstract_step(TINY, rows=8, num_layers=1).forward.args[1].shape[0] == 1
    types = {**TINY, "model_type": "qwen3", "layer_types": ["full_attention"] * 4}
    assert abstract_step(types, rows=8, num_layers=2).num_layers == 2
    with pytest.raises(ModelError, match="num_layers=5 must be between 1 and the model's 4"):
        abstract_step(TINY, rows=8, num_layers=5)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="tokens=8 and rows=8"):
        abstract_step(TINY, rows=8, tokens=8)
    with pytest.raises(ConfigError, match="no_such_option"):
        abstract_step(TINY, rows=8, no_such_option=1)
    with pytest.raises(ConfigError, match=r"16,060,522,496 bytes leave no room .* 17,179,869,184 bytes"):
        abstract_step("llama-3.1-8b", rows=8, platform="tpu", memory=16 << 30)


@pytest.mark.parametrize("rows", [0, -3])
def test_a_step_without_rows_is_refused(rows):
    with pytest.raises(ValueError, match=f"at least one row, got rows={rows}"):
        abstract_step(TINY, rows=rows)


def test_the_abstract_step_is_the_one_that_runs():
    """On the CPU, with arrays: the step accepts what the abstract one describes."""
    step = abstract_step(TINY, rows=4, platform="cpu", pool_bytes=1 << 20, max_num_seqs=4)
    forward, sample, plain = (
        jax.jit(p.function, donate_argnums=p.donate_argnums).lower(*p.args).compile(p.compiler_options)
        for p in step[:3]
    )
    arrays, others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (step.forward.args, step.sample.args))
    pool, slots, forwarded = forward(*arrays)
    assert (pool.shape, pool.dtype) == (step.forward.args[1].shape, step.forward.args[1].dtype)
    slots, sampled = sample(slots, others[1], forwarded.logits, forwarded.rows, others[4])
    assert slots.history.shape == step.forward.args[2].history.shape and sampled.tokens.shape == (4,)
    slots, tokens = plain(slots, forwarded.logits, forwarded.rows)
    assert tokens.tolist() == sampled.tokens.tolist()


@needs_compilers
def test_the_structural_gate_of_a_decode_step():
    """Llama 3.1 8B, 64 rows, on an H200: nine launches a layer, no weight or KV page copied; spills are errors."""
    step = abstract_step("llama-3.1-8b", rows=64).forward
    program = compiled("h200", step)
    layers = layer_launches(program, 32)
    assert program.seconds < 60
    assert max(len(layer) for layer in layers[1:]) <= 9, [launch.name for launch in typical_layer(program, 32)]
    assert all(launch.inside == "" for layer in layers for launch in layer)
    assert not state_copies(program)
    assert not [
        copy for layer in layers for copy in program.copies if copy.source in {x.source for x in layer if x.source}
    ]
    pool, slots = step.args[1:3]
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((pool, slots)))
    assert program.aliased_bytes == donated and len(program.aliases) == 1 + len(slots)
    logits = 4 * 64 * 128256
    assert program.temporary_bytes < logits, program.temporaries[:10]


@needs_compilers
def test_a_plain_step_samples_in_few_launches_that_wait_for_nothing():
    program = compiled("h200", abstract_step("llama-3.1-8b", rows=64).sample_plain)
    assert len(program.launches) <= 6, program.launches
    assert not [word for word in (" conditional(", " while(") if word in program.compiled.as_text()]
    assert not program.copies and len(program.aliases) == len(Slots._fields)
    assert program.temporary_bytes < 4 * 64 * 128256, program.temporaries[:10]


@needs_compilers
def test_a_step_with_features_samples_in_place():
    """Of a small model with a large vocabulary, whose logits weigh most: it makes three arrays of them, and masks."""
    step = abstract_step("gemma-3-4b", rows=64)
    program = compiled("h200", step.sample)
    logits = 4 * 64 * 262208
    assert not [copy for copy in program.copies if copy.argument.startswith(("slots", "wide"))]
    assert sum(copy.bytes >= logits for copy in program.copies) <= 3, program.copies[:9]
    assert len(program.aliases) == len(Slots._fields)
    assert program.temporary_bytes < min(3.5 * logits, 0.03 * step.weight_bytes), program.temporaries[:10]


def hold_several_steps(model: str | dict, device: str, layers: int) -> None:
    """What a single step holds is held by the loop of several: donated state, no copies of it, launches a layer."""
    step = abstract_step(model, rows=64, num_layers=layers, memory=DEVICES[device].memory)
    assert step.decode
    one, several = compiled(device, step.forward), compiled(device, step.decode)
    layer, layer_of_several = (typical_layer(program, layers) for program in (one, several))
    assert {launch.inside.partition("/")[0] for launch in layer_of_several} == {"While"}
    assert [launch.kind for launch in layer_of_several] == [launch.kind for launch in layer]
    assert several.aliased_bytes == one.aliased_bytes and several.aliases.keys() >= one.aliases.keys()
    assert not state_copies(several, above=1 << 12), several.copies[:9]


@needs_compilers
def test_several_steps_in_one_program_copy_no_state():
    hold_several_steps(TINY, "h200", 2)


@needs_compilers
@pytest.mark.slow
def test_several_steps_of_a_large_model_copy_no_state():
    """Its histories are 135 MB."""
    hold_several_steps("llama-3.1-8b", "h200", 4)


@needs_compilers
def test_the_layers_are_counted_right():
    """By name, as reports do it, and by what another layer adds."""
    four, two = (abstract_step(TINY, rows=8, num_layers=layers).forward for layers in (4, 2))
    more, fewer = compiled("h200", four), compiled("h200", two)
    assert 2 * len(typical_layer(more, 4)) == len(more.launches) - len(fewer.launches)
    assert len(layer_launches(more, 4)) == 4
    with pytest.raises(ValueError, match=r"layers \[4\]"):
        layer_launches(more, 5)


@needs_compilers
def test_the_gate_can_fail():
    """A step that is not given its state copies it; one without our compiler options has more launches."""
    step = abstract_step(TINY | {"hidden_size": 4096, "head_dim": 64}, rows=64, num_layers=4).forward
    kept = compile_for("h200", step.function, *step.args, compiler_options=compiler_options("gpu"))
    assert {copy.argument for copy in state_copies(kept)} >= {"kv_pages"}
    plain = compile_for("h200", step.function, *step.args, donate_argnums=step.donate_argnums)
    assert len(typical_layer(plain, 4)) > len(typical_layer(kept, 4))


@needs_compilers
def test_the_command_reports_on_a_step(tmp_path, capsys):
    path, out = tmp_path / "config.json", tmp_path / "report.json"
    path.write_text(json.dumps(TINY))
    arguments = ["--device", "h200", "--model", str(path), "--batch", "4", "--mixed", "32", "--json", str(out)]
    assert __main__.main(arguments) == 0
    text, data = capsys.readouterr().out, json.loads(out.read_text())
    assert data["launches_per_layer"] == len(data["layer"]) <= 11
    assert f"launches per layer           {data['launches_per_layer']}" in text
    assert data["sampling"]["launches"] > data["sampling"]["launches_always"] > 0
    plain = data["plain_sampling"]
    assert plain["launches"] == plain["launches_always"] > 0 and f"features    {plain['launches']} launches" in text
    assert data["layers"] == 4 and data["mixed"] == 32 and data["seconds"] > 0


@needs_compilers
def test_the_command_prints_a_line_for_each_of_several_steps(tmp_path, capsys):
    path, out = tmp_path / "tiny.json", tmp_path / "report.json"
    path.write_text(json.dumps(TINY))
    arguments = ["--device", "h200", "a100", "--model", str(path), "--batch", "4", "--layers", "2", "--json", str(out)]
    assert __main__.main(arguments) == 0
    lines, data = capsys.readouterr().out.splitlines(), json.loads(out.read_text())
    assert len(lines) == 3 and [line.split()[:3] for line in lines[1:]] == [
        ["tiny.json", "h200", "4"],
        ["tiny.json", "a100", "4"],
    ]
    weights = abstract_step(TINY, rows=4).weight_bytes  # of all four layers
    assert [report["weight_bytes"] for report in data] == [weights] * 2
    assert f"{data[0]['temporary_bytes'] / weights:.2%}" in lines[1]


def hold_the_limits(name: str, device: str, tokens: int | None) -> None:
    """Launches, copies and temporaries of six layers, which is what Gemma 3 takes to have a global one.

    A mixed step attends in two launches. So does a decode step with fewer rows times KV heads than a GPU has cores:
    then the keys are split.
    """
    layers = min(6, hf_config(name)["num_hidden_layers"])
    step = abstract_step(name, rows=64, tokens=tokens, num_layers=layers)
    program = compiled(device, step.forward)
    most = max(len(layer) for layer in layer_launches(program, layers)[1:])
    assert most <= (9 if tokens is None else 10), [launch.name for launch in typical_layer(program, layers)]
    assert not state_copies(program)
    assert program.temporary_bytes < 0.03 * step.weight_bytes, program.temporaries[:10]
    assert not program.spills


@needs_compilers
def test_norms_around_everything_cost_no_launch():
    hold_the_limits("gemma-3-4b", "h200", None)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, device, tokens",
    [
        *((name, "h200", None) for name in KNOWN),
        *((name, "h200", 2048) for name in ("llama-3.1-8b", "qwen3-8b", "gemma-2-9b", "gemma-3-4b", "gemma-3-12b")),
        *((name, device, None) for name in ("llama-3.1-8b", "gemma-3-4b") for device in ("a100", "b200")),
    ],
)
def test_every_well_known_model_holds_the_limits(name, device, tokens):
    hold_the_limits(name, device, tokens)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("device", ("a100", "h100", "b200", "l4", "v5e", "v6e", "v5p", "v7x"))
def test_every_device(device):
    platform = "tpu" if device.startswith("v") else "gpu"
    step = abstract_step("llama-3.1-8b", rows=64, num_layers=4, platform=platform, memory=DEVICES[device].memory)
    compiled(device, step.sample)
    program = compiled(device, step.forward)
    assert not state_copies(program, above=0 if platform == "gpu" else 1 << 20)  # TPUs widen the weights of norms apart
    assert platform == "tpu" or len(typical_layer(program, 4)) <= 9
