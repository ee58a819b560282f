"""Compiled programs on disk, found without being traced.

JAX's own cache is keyed by what a program was lowered to, and tracing a model and lowering it takes longer than all
else of a start. Here the key is what that depends on: our sources, versions, device, flags, options, shapes. Only
programs of our own models are kept, as nothing is known of other code.

JAX serializes a program as a pickle with machine code in it: it is read only from a folder that nobody else can write.
What cannot be read is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib.version
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable
from jax.extend.mlir import ir

import jaxpaged
import pallas_kernels
from jaxpaged.device.compilation import compilations
from jaxpaged.device.platform import cpu_flags
from jaxpaged.device.step_program import compile_step

logger = logging.getLogger(__name__)

_FOLDER = "ahead-of-time"  # below that of JAX's own cache
_DAYS_UNUSED = 30
_DIGEST_BYTES = hashlib.sha256().digest_size
_VARIABLES = ("XLA_", "JAX_", "LIBTPU_", "TF_", "CUDA_", "NVIDIA_", "TRITON_")  # beginnings of their names


class ProgramStore:
    """Gives programs by name, from disk or compiled.

    Args:
      folder: of the cache; None: nothing is kept.
      made_of: what all programs depend on besides sources and machine, in words: the model and the options.
    """

    def __init__(self, folder: Path | None = None, made_of: str = ""):
        anywhere = jax.config.values["jax_default_device"] is None  # else programs run elsewhere than on the first one
        self._folder = _private(folder / _FOLDER) if folder is not None and anywhere else None
        self._made_of = made_of

    def program(
        self,
        name: str,
        arguments: tuple[Any, ...],
        lower: Callable[[], jax.stages.Lowered],
        options: dict[str, str | bool] | None = None,
    ) -> jax.stages.Compiled:
        """The program of that name for such arguments.

        Args:
          name: tells it from all others of the same `made_of` and arguments.
          arguments: positional ones, arrays or their shapes and dtypes.
          lower: makes it where it is not on disk, but for compiling.
          options: of the compiler.
        """
        if self._folder is None:
            return compile_step(lower(), options)
        structure = jax.tree.structure((arguments, {}))
        key = self._key(name, arguments, structure)
        program = _read(self._folder / key, structure)
        if program is None:
            lowered, hits = lower(), compilations.cache_hits
            _rename(lowered, key)
            program = compile_step(lowered, options)
            # XLA:CPU loses the code of a program that it has read, not compiled.
            if hits == compilations.cache_hits or jax.default_backend() != "cpu":
                _write(self._folder / key, program, structure)
        return program

    def _key(self, name: str, arguments: tuple[Any, ...], structure: Any) -> str:
        shapes = [(x.shape, str(x.dtype), str(getattr(x, "sharding", None))) for x in jax.tree.leaves(arguments)]
        what = repr((_surroundings(), _settings(), self._made_of, name, shapes, str(structure)))
        return f"{name.split()[0]}-{hashlib.sha256(what.encode()).hexdigest()}"


def _rename(lowered: jax.stages.Lowered, key: str) -> None:
    """Names a module after its key, so that JAX's own cache has it only if all that the key tells of was the same.

    Else an upgrade that leaves it alone would find it there, and what XLA:CPU has read it cannot write.
    """
    module = lowered.compiler_ir()
    assert module is not None
    with module.context:
        module.operation.attributes["sym_name"] = ir.StringAttr.get("jit_" + key[: key.index("-") + 17])


def _read(path: Path, structure: Any) -> jax.stages.Compiled | None:
    """The program of a file; None if there is none that is whole and fits."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            return None
        results, _, serialized = zlib.decompress(content[_DIGEST_BYTES:]).partition(b"\n")
        device = jax.devices()[0]
        program = serialize_executable.deserialize_and_load(
            serialized,
            structure,
            jax.tree.structure(_tree(json.loads(results))),
            backend=device.client,
            execution_devices=[device],
        )
    except FileNotFoundError:
        return None
    except Exception:  # whatever XLA or pickle say of it: then it is compiled
        return None
    compilations.count += 1  # it takes time as well
    with contextlib.suppress(OSError):
        os.utime(path)
    return program


def _write(path: Path, program: jax.stages.Compiled, structure: Any) -> None:
    """Keeps a program, unless it cannot be: then the next start compiles it as well."""
    try:
        serialized, arguments, results = serialize_executable.serialize(program)
        executable = program.runtime_executable()
        if arguments != structure or executable is None or executable.local_devices() != jax.devices()[:1]:
            return
        described = json.dumps(_described(results.unflatten([0] * results.num_leaves)))
        content = zlib.compress(described.encode() + b"\n" + serialized, 1)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
        _forget_unused(path.parent)
    except Exception as error:  # whatever XLA, pickle or the disk say of it
        logger.warning("a compiled program cannot be kept in %s: %r", path.parent, error)


def _described(tree: Any) -> Any:
    """A tree of tuples, named ones too, None and leaves (zeros), as JSON: the tuples' types and parts, null, and 0.

    Raises ValueError for other trees.
    """
    if tree is None or tree == 0:
        return tree
    kind = type(tree)
    if not isinstance(tree, tuple) or "<locals>" in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__} in the results of a program")
    return [f"{kind.__module__}:{kind.__qualname__}", list(map(_described, tree))]


def _tree(described: Any) -> Any:
    """What was described."""
    if described is None or described == 0:
        return described
    name, parts = described
    module, _, kind = name.partition(":")
    parts = tuple(map(_tree, parts))
    return parts if name == "builtins:tuple" else attrgetter(kind)(importlib.import_module(module))(*parts)


def _forget_unused(folder: Path) -> None:
    """Removes what no start has used for long: programs of other versions, as a rule."""
    oldest = time.time() - _DAYS_UNUSED * 24 * 3600
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _private(folder: Path) -> Path | None:
    """The folder, made if need be; None, with a warning, if another user could write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        logger.warning("compiled programs are not kept: %s", error)
        return None
    if status.st_uid == os.getuid() and not status.st_mode & 0o022 and not folder.is_symlink():
        return folder
    logger.warning("compiled programs are not kept: %s is not this user's alone to write into", folder)
    return None


@functools.cache
def _surroundings() -> str:
    """What programs depend on that stays the same while a process runs."""
    device = jax.devices()[0]
    versions = [jax.__version__, jaxlib.version.__version__, flax.__version__, np.__version__, ml_dtypes.__version__]
    machine = [device.platform, device.device_kind, device.client.platform_version, len(jax.devices())]
    if device.platform == "cpu":
        machine += [sorted(cpu_flags()), len(os.sched_getaffinity(0)), os.cpu_count()]
    return repr((sys.version, versions, machine, _sources()))


def _sources() -> str:
    """A digest of every file of our packages that programs are made from: code, and tables of measured choices."""
    digest = hashlib.sha256()
    for package in (jaxpaged, pallas_kernels):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                digest.update(
                    repr((str(path.relative_to(folder)), len(content := path.read_bytes()))).encode() + content
                )
    return digest.hexdigest()


def _settings() -> str:
    """Flags of XLA and JAX, as they are now."""
    # Which devices are visible tells no two of a kind apart; what kind they are, and how many, is said elsewhere.
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and "VISIBLE" not in name
    }
    options = {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name}
    return repr((sorted(variables.items()), sorted(options.items())))
