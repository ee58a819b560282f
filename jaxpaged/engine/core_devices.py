"""Which devices each engine core sees, where several run on one machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxpaged.errors import ConfigError


def device_environment(
    rank: int, num_cores: int, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> dict[str, str]:
    """Environment variables that give core `rank` of `num_cores` one device of those that this process may use.

    Nothing is set for one core alone, nor on a CPU, which all share.

    Args:
      environment: of this process.
      devices: where the system lists its devices; for tests.

    Raises:
      ConfigError: there are fewer devices than cores.
    """
    if num_cores == 1 or environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return {}
    gpus = _visible("CUDA_VISIBLE_DEVICES", environment, _numbers(devices, r"nvidia(\d+)"))
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": _own(gpus, rank, num_cores)}
    chips = _numbers(devices, r"accel(\d+)") or _numbers(devices / "vfio", r"(\d+)")
    chips = _visible("TPU_VISIBLE_CHIPS", environment, chips)
    if chips:
        alone = dict.fromkeys(("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"), "1,1,1")
        return {"TPU_VISIBLE_CHIPS": _own(chips, rank, num_cores), **alone}
    return {}


def _visible(variable: str, environment: Mapping[str, str], present: list[str]) -> list[str]:
    said = environment.get(variable)
    return present if said is None else [name.strip() for name in said.split(",") if name.strip()]


def _numbers(folder: Path, pattern: str) -> list[str]:
    """Numbers of the devices whose names match."""
    names = [path.name for path in folder.glob("*")]
    return sorted((m[1] for name in names if (m := re.fullmatch(pattern, name))), key=int)


def _own(names: list[str], rank: int, num_cores: int) -> str:
    if len(names) < num_cores:
        raise ConfigError(f"data_parallel_size={num_cores} needs as many devices; visible: {', '.join(names)}")
    return names[rank]
