"""The accelerators that can be compiled for without having one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What XLA must know of a CUDA device to compile for it.

    Attributes:
      kind: the name that the driver reports; `jax.Device.device_kind` on the real device.
      cores: streaming multiprocessors.
      fpus_per_core: float32 lanes of one.
      shared_memory_per_core: bytes.
      shared_memory_per_block: bytes that one block may take, by opting in.
      bandwidth: of device memory, bytes/s.
      l2_cache, memory: bytes.
      clock: GHz, boosted.
      capability: compute capability.
      threads_per_core: that can be resident at once.
      accelerated: compile for exactly this architecture ("sm_90a"), which unlocks instructions that later ones lack.
    """

    kind: str
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    bandwidth: int
    l2_cache: int
    clock: float
    memory: int
    capability: tuple[int, int]
    accelerated: bool
    threads_per_core: int = 2048

    @property
    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f"""
gpu_device_info {{
  name: "{self.kind}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {self.threads_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


@dataclass(frozen=True)
class Tpu:
    """A TPU, by a topology that has it.

    Attributes:
      topology: libtpu's name of the smallest slice that it can describe; programs use its first chip only.
      memory: bytes of a device (of v7x, half a chip), by Google's data sheets.
    """

    topology: str
    memory: int


# A100, H100, H200 and B200: XLA's own target descriptions, xla/backends/gpu/target_config/specs in openxla/xla. L4: the
# same fields from NVIDIA's data sheet and the CUDA programming guide's table of compute capabilities.
DEVICES: dict[str, Gpu | Tpu] = {
    "a100": Gpu(
        kind="NVIDIA A100-SXM4-80GB",
        cores=108,
        fpus_per_core=64,
        shared_memory_per_core=167936,
        shared_memory_per_block=166912,
        bandwidth=2039040000000,
        l2_cache=41943040,
        clock=1.41,
        memory=85100068864,
        capability=(8, 0),
        accelerated=False,
    ),
    "l4": Gpu(
        kind="NVIDIA L4",
        cores=58,
        fpus_per_core=128,
        shared_memory_per_core=102400,
        shared_memory_per_block=101376,
        bandwidth=300096000000,
        l2_cache=50331648,
        clock=2.04,
        memory=23580639232,
        capability=(8, 9),
        accelerated=False,
        threads_per_core=1536,
    ),
    "h100": Gpu(
        kind="NVIDIA H100 80GB HBM3",
        cores=132,
        fpus_per_core=128,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        bandwidth=3352320000000,
        l2_cache=52428800,
        clock=1.98,
        memory=84942979072,
        capability=(9, 0),
        accelerated=True,
    ),
    "h200": Gpu(
        kind="NVIDIA H200",
        cores=132,
        fpus_per_core=128,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        bandwidth=4800000000000,
        l2_cache=52428800,
        clock=1.98,
        memory=151397597184,
        capability=(9, 0),
        accelerated=True,
    ),
    "b200": Gpu(
        kind="NVIDIA B200",
        cores=148,
        fpus_per_core=128,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        bandwidth=7672320000000,
        l2_cache=132644864,
        clock=1.965,
        memory=191514411008,
        capability=(10, 0),
        accelerated=True,
    ),
    "v5e": Tpu("v5e:2x2", 16 << 30),
    "v5p": Tpu("v5p:2x2x1", 95 << 30),
    "v6e": Tpu("v6e:2x2", 32 << 30),
    "v7x": Tpu("tpu7x:2x2x1", 96 << 30),
}
"""By the name that users type."""


def get_device(name: str) -> Gpu | Tpu:
    """The device of that name; raises ValueError."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]
