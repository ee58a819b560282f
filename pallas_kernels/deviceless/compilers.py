"""Finding the compilers: jax's CUDA plugin with NVIDIA's ptxas, and libtpu. None needs its device to compile for it.

They may be importable already. Else they are looked for in a folder of their own, `<environment>/deviceless`: beside
jax itself they would be started with every program, and complain where there is no device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels.deviceless.devices import Gpu, get_device

FOLDER = Path(sys.prefix) / "deviceless"

# libtpu asks a metadata server which machine it is on, and lets one process load it, unless it is told otherwise.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class CompilerMissingError(ModuleNotFoundError):
    """The compiler for a device is not installed; the message says how to install it."""


@functools.cache
def mesh_for(device: str) -> Mesh:
    """A mesh of one such device, whose arrays cannot exist, only be compiled for.

    Raises:
      ValueError: unknown device.
      CompilerMissingError: its compiler is not installed.
    """
    target = get_device(device)
    jax.default_backend()  # whatever this machine has starts first: no compiler may take its place
    if isinstance(target, Gpu):
        if not ptxas():
            raise _missing("ptxas", device)
        topology = _cuda_topology(target)
    else:
        if not _importable("libtpu"):
            raise _missing("libtpu", device)
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(target.topology, platform="tpu")
    return Mesh(np.array(topology.devices[:1]), ("device",))


def requirements() -> list[str]:
    """What pip must install, of the versions that belong to this jax."""
    jax_version = importlib.metadata.version("jax")
    lines = importlib.metadata.requires("jax") or []
    libtpu = next(match[1] for line in lines if (match := re.match(r"(libtpu\S*) *; *extra *== *.tpu.", line)))
    plugin = [f"jax-cuda12-plugin=={jax_version}", f"jax-cuda12-pjrt=={jax_version}"]
    return [*plugin, "nvidia-cuda-nvcc-cu12==12.9.*", libtpu]


def missing() -> list[str]:
    """Names of the compilers that are not installed."""
    names = ["jax_cuda12_plugin", "jax_plugins.xla_cuda12", "libtpu"]
    return [name for name in names if not _importable(name)] + ([] if ptxas() else ["ptxas"])


def ptxas() -> Path | None:
    """NVIDIA's assembler: of the package that `jax[cuda12]` brings too, else the system's; None if there is none."""
    packages = (Path(folder) / "nvidia" / "cuda_nvcc" / "bin" / "ptxas" for folder in [str(FOLDER), *sys.path])
    found = next((path for path in packages if path.is_file()), None) or shutil.which("ptxas")
    return Path(found) if found else None


def _cuda_topology(target: Gpu) -> topologies.TopologyDescription:
    def describe() -> topologies.TopologyDescription:
        return topologies.get_topology_desc(
            target.kind, platform="cuda", topology="1x1x1", target_config=target.target_config
        )

    try:
        return describe()
    except NotImplementedError:  # jax started without the plugin
        pass
    for name in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"):
        if not _importable(name):
            raise _missing(name, target.kind)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it wants a driver and CUDA's libraries
    importlib.import_module("jax_plugins.xla_cuda12").initialize()
    return describe()


def _missing(name: str, device: str) -> CompilerMissingError:
    wanted = " ".join(f"'{line}'" for line in requirements())
    return CompilerMissingError(
        f"compiling for {device} needs {name}, which is not installed. Install the compilers with "
        f"`{sys.executable} -m pip install --no-deps --target {FOLDER} {wanted}`",
        name=name,
    )


def _importable(name: str) -> bool:
    """Whether `name` can be imported, after the folder has been added to the path if it must be."""
    if _found(name):
        return True
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        importlib.invalidate_caches()
    return _found(name)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
