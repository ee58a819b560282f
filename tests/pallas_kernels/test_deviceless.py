"""Compiling for devices that are not there: what the report on a program says, and every kernel on every device."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Array
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import add_rms_norm, ragged_paged_attention, write_kv
from pallas_kernels.deviceless import (
    DEVICES,
    CompilerMissingError,
    MemoryOverflowError,
    Program,
    RegisterSpillError,
    __main__,
    compile_for,
    compilers,
    requirements,
)
from pallas_kernels.deviceless.devices import Gpu
from tests.compilers import needs_compilers

pytestmark = needs_compilers

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def twice(x: jax.Array) -> jax.Array:
    """A Triton kernel of 8 blocks of 4 warps."""

    def kernel(x, out):
        out[...] = x[...] * 2

    spec = pl.BlockSpec((x.shape[0] // 8,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=Array(x.shape, x.dtype),
        grid=(8,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="twice",
    )(x)


def product(x: jax.Array, y: jax.Array, num_warps: int) -> jax.Array:
    """A Triton kernel that holds all of x [M, K], y [K, N] and their product."""

    def kernel(x, y, out):
        out[...] = lax.dot(x[...], y[...], preferred_element_type=F32)

    params = pltriton.CompilerParams(num_warps=num_warps, num_stages=1)
    shape = Array((x.shape[0], y.shape[1]), F32)
    return pl.pallas_call(kernel, out_shape=shape, compiler_params=params, name="product")(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_a_compiler(device):
    program = compile_for(device, lambda x: jnp.sin(x) + 1, Array((256, 128), F32))
    assert len(program.launches) == 1 and not program.copies
    assert program.argument_bytes == program.output_bytes == 4 * 256 * 128


def test_launches_with_their_grid_and_source():
    program = compile_for("h200", lambda x: twice(jnp.sin(x)), Array((1024,), F32))
    sin, kernel = program.launches
    assert (kernel.name, kernel.grid, kernel.threads) == ("twice", (8, 1, 1), (128, 1, 1))
    assert kernel.kind == sin.kind == "CustomKernel" and kernel.inside == ""
    assert kernel.source.endswith("twice/pallas_call") and sin.source.endswith("/sin")


def test_launches_inside_of_control_flow():
    def step(n, x):
        x = lax.fori_loop(0, n, lambda _, y: twice(y), x)
        return lax.cond(x[0] > 0, jnp.sin, twice, x)

    program = compile_for("h200", step, Array((), I32), Array((1024,), F32))
    inside = [launch.inside for launch in program.launches if launch.name.startswith("twice")]
    assert sorted(inside) == ["Conditional", "While"]

    def nested(n, x):
        return lax.fori_loop(0, n, lambda i, y: lax.cond(y[0, 0] > 0, lambda: jnp.roll(y, i, 0), lambda: y @ y), x)

    program = compile_for("v6e", nested, Array((), I32), Array((1024, 1024), F32))
    assert {launch.inside for launch in program.launches if "cond" in launch.source} >= {"While/Conditional"}


def test_shared_memory_of_a_kernel():
    program = compile_for("a100", partial(product, num_warps=4), Array((64, 128), BF16), Array((128, 64), BF16))
    assert 16 << 10 <= program.launches[0].shared_memory <= 166912


@pytest.mark.parametrize("device", ("h200", "v6e"))
def test_a_donated_argument_is_updated_in_place(device):
    def write(offset, pool):
        return lax.dynamic_update_slice(pool, jnp.ones((1, 1024), F32), (offset, 0)), offset + 1

    shapes = Array((), I32), Array((1 << 18, 1024), F32)
    program = compile_for(device, write, *shapes, donate_argnums=1)
    assert program.aliases == {1: 0} and program.aliased_bytes == 1 << 30
    assert program.copied_bytes == 0 and program.temporary_bytes < 1 << 20
    kept = compile_for(device, write, *shapes)
    assert kept.aliases == {} and [(copy.argument, copy.bytes) for copy in kept.copies] == [("pool", 1 << 30)]


@pytest.mark.parametrize("device", ("h200", "v6e"))
def test_copies_of_arguments_are_found(device):
    """Whatever way they took: under another shape, cut, through a loop, or after an update in place."""

    def peek(x):
        """The first corner of x, by a kernel: it wants x as it is."""
        corner = pl.BlockSpec((8, 128), lambda _: (0, 0))
        return pl.pallas_call(
            lambda x, out: out.__setitem__(..., x[...] * 2),
            out_shape=Array((8, 128), F32),
            grid=(1,),
            in_specs=[corner],
            out_specs=corner,
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1) if device == "h200" else None,
        )(x)

    def step(weight, pool, x, n):
        pool = lax.dynamic_update_slice(pool, x[None], (n, 0))
        pool, total = lax.fori_loop(0, n, lambda _, c: (c[0], c[1] + peek(c[0].T)), (pool, jnp.zeros((8, 128))))
        return pool, total + peek(weight.reshape(8192, 8192)[:, :4096].T.astype(F32))

    shapes = Array((2, 4096, 8192), BF16), Array((1 << 18, 1024), F32), Array((1024,), F32), Array((), I32)
    program = compile_for(device, step, *shapes, donate_argnums=1)
    found = {copy.argument: copy.bytes for copy in program.copies if copy.argument in ("weight", "pool")}
    assert found["weight"] >= 2 * 8192 * 4096 and found["pool"] == 1 << 30, program.copies
    assert program.copied_argument_bytes >= sum(found.values())


@pytest.mark.parametrize("device", ("h200", "v6e"))
def test_arguments_in_row_major_order(device):
    """[65536, 6, 64]: a TPU keeps it in another order unless it is told otherwise."""

    def step(x, pool):
        return x + 1, pool.at[7].multiply(2)

    shapes = Array((1 << 16, 6, 64), BF16), Array((1 << 16, 6, 64), F32)
    texts = [compile_for(device, step, *shapes, row_major=given).compiled.as_text() for given in ((), (1,))]
    layouts = [re.search(r"entry_computation_layout=.*?f32\[65536,6,64\]\{([\d,]+)", text)[1] for text in texts]
    assert layouts[1] == "2,1,0" and (device == "h200") == (layouts[0] == layouts[1])


def test_what_is_computed_is_no_copy():
    program = compile_for("h200", lambda x: (x * 2).sum(1), Array((512, 512), F32))
    assert not program.copies and program.copied_bytes == 0


def test_temporaries():
    program = compile_for("h200", lambda x: twice(jnp.sin(twice(x))), Array((1 << 16,), F32))
    assert program.temporaries[0].shape == "f32[65536]"
    assert program.temporary_bytes >= program.temporaries[0].bytes == 4 << 16


def test_register_spills_are_errors():
    """16,384 float32 sums in one warp: 512 a thread, which has 255 registers."""
    shapes = Array((128, 32), BF16), Array((32, 128), BF16)
    with pytest.raises(RegisterSpillError, match=r"spilled on h200 by product \(\d{3,} bytes\)"):
        compile_for("h200", partial(product, num_warps=1), *shapes)
    program = compile_for("h200", partial(product, num_warps=1), *shapes, may_spill=["prod"])
    assert program.launches and program.spills["product"] >= 100


def test_too_much_shared_memory_is_an_error():
    with pytest.raises(MemoryOverflowError, match=r"a100.*Shared memory.*166912"):
        compile_for("a100", partial(product, num_warps=4), Array((64, 1024), BF16), Array((1024, 64), BF16))


def test_too_much_vmem_is_an_error():
    def kernel(x, out, scratch):
        scratch[0] = x[...]
        out[...] = scratch[0] * 2

    scratch = pltpu.VMEM((1 << 16, 8, 128), F32)
    large = pl.pallas_call(kernel, out_shape=Array((8, 128), F32), scratch_shapes=[scratch])
    with pytest.raises(MemoryOverflowError, match="v5e"):
        compile_for("v5e", large, Array((8, 128), F32))


def test_what_pallas_cannot_lower_is_an_error():
    def kernel(x, out):
        out[...] = jnp.sort(x[...])

    params = pltriton.CompilerParams(num_warps=4, num_stages=1)
    with pytest.raises(NotImplementedError, match="sort"):
        compile_for(
            "h200", pl.pallas_call(kernel, out_shape=Array((128,), F32), compiler_params=params), Array((128,), F32)
        )


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match=r"unknown device 'h300'.*a100.*h200.*v6e"):
        compile_for("h300", jnp.sin, Array((8,), F32))


@pytest.mark.parametrize("device, package", [("h200", "jax-cuda12-plugin"), ("v6e", "libtpu")])
def test_a_missing_compiler_says_what_to_install(device, package, monkeypatch):
    def nothing(*args, **kwargs):
        raise NotImplementedError("as jax says without the plugin")

    monkeypatch.setattr(compilers, "_importable", lambda name: False)
    monkeypatch.setattr(compilers.topologies, "get_topology_desc", nothing)
    with pytest.raises(CompilerMissingError, match=rf"pip install .*--target \S*deviceless .*{package}"):
        compilers.mesh_for.__wrapped__(device)


def test_the_compilers_belong_to_this_jax():
    plugin, pjrt, nvcc, libtpu = requirements()
    assert nvcc.startswith("nvidia-cuda-nvcc-cu12==12.")
    assert plugin == f"jax-cuda12-plugin=={jax.__version__}" and pjrt == f"jax-cuda12-pjrt=={jax.__version__}"
    assert libtpu.startswith("libtpu==0.")


def test_two_processes_may_compile_at_once_and_nothing_is_cached(tmp_path):
    """After the CPU's backend has started, with a compilation cache in use, and no warnings."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "jnp.ones(3).block_until_ready()\n"
        "from pallas_kernels.deviceless import compile_for\n"
        "x = jax.ShapeDtypeStruct((64, 128), 'float32')\n"
        "for device in ('h200', 'v6e', 'h200'):\n"
        "    jax.clear_caches()\n"
        "    assert compile_for(device, lambda x: jnp.sin(x) + 2, x).launches\n"
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    env = {**os.environ, **cache, "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0", "PYTHONPATH": os.getcwd()}
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert not [path.name for path in tmp_path.iterdir() if "lambda" in path.name]


def test_the_command_says_when_jaxpaged_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "STEPS", "no_such_package.steps")
    assert __main__.main(["--device", "h200", "--model", "llama-3.1-8b", "--batch", "1"]) == 1
    assert "not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "smollm2-135m", "--layers", "99"], "num_layers=99"),
        (["--model", "smollm2-135m", "--mixed", "4"], "tokens=4"),
        (["--model", "smollm2-135m", "--block-size", "17"], "block_size=17"),
    ],
)
def test_the_command_names_a_wrong_argument(arguments, message, capsys):
    assert __main__.main(["--device", "h200", "--batch", "8", *arguments]) == 1
    assert message in capsys.readouterr().err


# Every kernel on every device.

SCALES = {"k_scale": 0.5, "v_scale": 2.0}
FAST = ("a100", "h200", "b200", "v5e", "v6e", "v7x")  # what every change compiles for; the others are slow tests
ELEMENTS = 9 << 28  # of a pool: more bytes than 32 bits can count


@dataclass(frozen=True)
class Case:
    """Shapes and options of a model's attention.

    Attributes:
      refused: platform -> what the NotImplementedError names, where the kernels do not take it.
    """

    head_dim: int
    group: int
    kv_heads: int
    page_size: int
    dtype: str
    pool_dtype: str
    options: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)

    @property
    def pool(self) -> Array:
        elements = ELEMENTS * 2 if jnp.dtype(self.pool_dtype).itemsize == 1 else ELEMENTS
        slots = elements // (2 * self.kv_heads * self.head_dim)
        shape = (4, slots // self.page_size // 4, self.page_size, 2 * self.kv_heads, self.head_dim)
        return Array(shape, self.pool_dtype)


CASES = {
    "llama": Case(128, 4, 8, 16, "bfloat16", "bfloat16"),
    "smollm": Case(64, 3, 3, 16, "bfloat16", "bfloat16", {"sinks": True}),
    "gemma": Case(256, 2, 8, 64, "bfloat16", "bfloat16", {"sliding_window": 4096, "soft_cap": 50.0}),
    "phi_float16": Case(80, 1, 4, 8, "float16", "float16", refused={"tpu": "float16"}),
    "multi_query_float8": Case(96, 16, 1, 32, "bfloat16", "float8_e4m3fn", SCALES),
    "float8_e5m2": Case(128, 8, 4, 64, "bfloat16", "float8_e5m2", {"sliding_window": 1024, **SCALES}),
    "qwen_int8": Case(192, 7, 4, 128, "bfloat16", "int8", SCALES),
    "float32": Case(256, 8, 2, 16, "float32", "float32", {"soft_cap": 50.0, "sinks": True}),
}


def attention(case: Case, implementation: str, *, decode: bool) -> tuple:
    """A function and its arguments: four rows of one query each, or as many rows as fill a device, with more."""
    rows = 4 if decode else 256
    tokens = rows if decode else 2 * rows
    heads = case.group * case.kv_heads
    options = {name: value for name, value in case.options.items() if name != "sinks"}

    def run(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, layer, sinks):
        return ragged_paged_attention(
            *(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, layer),
            sm_scale=0.1,
            sinks=sinks if case.options.get("sinks") else None,
            implementation=implementation,
            **options,
        )

    table = Array((rows, 8192 // case.page_size), I32)
    metadata = Array((rows,), I32), table, Array((rows + 1,), I32), Array((1,), I32), Array((1,), I32)
    return run, (Array((tokens, heads, case.head_dim), case.dtype), case.pool, *metadata, Array((heads,), F32))


def writing(case: Case, implementation: str) -> tuple:
    """A function and its arguments: 64 tokens, rotated in all of their dims."""
    scales = {name: value for name, value in case.options.items() if name in SCALES}

    def run(qkv, angles, kv_pages, slots, layer):
        return write_kv(qkv, angles, angles, kv_pages, slots, layer, implementation=implementation, **scales)

    qkv = Array((64, case.kv_heads, case.group + 2, case.head_dim), case.dtype)
    return run, (qkv, Array((64, case.head_dim // 2), F32), case.pool, Array((64,), I32), Array((1,), I32))


# (kernel, case, device) -> what is wrong; whoever mends it takes the line out, or the test fails.
KNOWN_FAULTS = {
    ("mixed", "float8_e5m2", "l4"): "spills",
    ("mixed", "multi_query_float8", "l4"): "spills",
}


QUICK_ON_TPUS = ("llama", "phi_float16", "multi_query_float8")  # where Mosaic takes no ten seconds for a mixed step


def cases(kernel: str) -> list:
    """Parameters (device, name) of every case on every device; rarer devices and slow compiles are marked slow."""
    params = []
    for device in DEVICES:
        for name in CASES:
            slow = device not in FAST or ((kernel, platform(device)) == ("mixed", "tpu") and name not in QUICK_ON_TPUS)
            marks = [pytest.mark.slow] if slow else []
            if fault := KNOWN_FAULTS.get((kernel, name, device)):
                marks.append(pytest.mark.xfail(reason=fault, raises=RegisterSpillError, strict=True))
            params.append(pytest.param(device, name, marks=marks))
    return params


def platform(device: str) -> str:
    return "gpu" if isinstance(DEVICES[device], Gpu) else "tpu"


def kernels(program: Program) -> int:
    """Launches of kernels written in Pallas; what XLA does to their arguments has the same source."""
    own = {"CustomKernel", "custom-call"}
    return sum(launch.source.endswith("pallas_call") and launch.kind in own for launch in program.launches)


def check(device: str, case: Case, function, arguments: tuple, *, pool: int, donate: bool = False) -> Program | None:
    """The program, or None where the kernels refuse the case as they should; `pool` is the pool's argument number."""
    compiled = partial(compile_for, device, function, *arguments, donate_argnums=pool if donate else ())
    if refusal := case.refused.get(platform(device)):
        with pytest.raises(NotImplementedError, match=refusal):
            compiled()
        return None
    program = compiled(row_major=[pool])
    assert not [copy for copy in program.copies if copy.argument == "kv_pages"]
    assert program.temporary_bytes < 64 << 20, program.temporaries[:3]
    return program


@pytest.mark.parametrize("device, name", cases("decode"))
def test_decode_compiles(device, name):
    case = CASES[name]
    program = check(device, case, *attention(case, platform(device), decode=True), pool=1)
    if program:
        assert kernels(program) == (2 if platform(device) == "gpu" else 1)  # GPUs split the keys of few rows


@pytest.mark.parametrize("device, name", cases("mixed"))
def test_mixed_compiles(device, name):
    case = CASES[name]
    program = check(device, case, *attention(case, platform(device), decode=False), pool=1)
    if program:
        assert kernels(program) == 2


@pytest.mark.parametrize("device, name", cases("write_kv"))
def test_write_kv_compiles_and_is_in_place(device, name):
    case = CASES[name]
    program = check(device, case, *writing(case, platform(device)), pool=2, donate=True)
    if program:
        assert program.aliases == {2: 1} and kernels(program) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype, dims, own", [("bfloat16", 4096, False), ("float16", 576, True), ("float32", 8192, True)]
)
def test_add_rms_norm_is_one_launch(device, dtype, dims, own):
    """With and without a norm of delta's own."""

    def norm(x, delta, weight):
        options = {"eps": 1e-5, "implementation": platform(device)}
        return add_rms_norm(x, delta, weight, delta_weight=weight if own else None, **options)

    x = Array((64, dims), dtype)
    program = compile_for(device, norm, x, x, Array((dims,), dtype))
    assert len(program.launches) == 1 or platform(device) == "tpu"


def test_the_cases_reach_every_value_on_every_platform():
    axes = {
        "head_dim": {64, 80, 96, 128, 192, 256},
        "group": {1, 2, 3, 4, 7, 8, 16},
        "page_size": {8, 16, 32, 64, 128},
        "dtype": {"float32", "float16", "bfloat16"},
        "pool_dtype": {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"},
    }
    for axis, values in axes.items():
        assert {getattr(case, axis) for case in CASES.values()} == values
    options = {name for case in CASES.values() for name in case.options}
    assert options == {"sliding_window", "soft_cap", "sinks", "k_scale", "v_scale"}
    assert 1 in {case.kv_heads for case in CASES.values()}
