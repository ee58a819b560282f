"""How the work is cut into programs and loop iterations: a heuristic, where nothing measured is on file."""

from dataclasses import dataclass

from pallas_kernels.padding import power_of_two


@dataclass(frozen=True)
class Tiles:
    """What a kernel's speed depends on and its result does not.

    Attributes:
      rows: (query, head) pairs of one KV head per program: the M of its products; a power of two, at least 16.
      keys: per loop iteration; a power of two, at least 16.
      splits: programs that share one row's keys, a power of two; their results are merged by a second launch.
      num_warps, num_stages: of the program; loads of `num_stages - 1` iterations are in flight.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Shape:
    """What the choice may depend on: all of it static.

    Attributes:
      tokens, rows: T and S.
      kv_heads, group, head_dim: K, G, H.
      pool_dtype: name of the dtype of the pool.
      compute_bytes: of one number in the products.
      page_size, max_pages: of the page table.
    """

    tokens: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    pool_dtype: str
    compute_bytes: int
    page_size: int
    max_pages: int


_PROGRAMS = 256  # that keep a large GPU (132 to 148 cores) busy
_KEYS_PER_SPLIT = 256  # at least: a split's result costs about as much to write and read as this many keys
_MAX_SPLITS = 64


def decode_tiles(shape: Shape) -> Tiles:
    """For rows with one query each: short of nothing but bandwidth, so many loads in flight."""
    width = power_of_two(shape.head_dim)
    keys = 64 if width * shape.compute_bytes <= 256 else 32 if width * shape.compute_bytes <= 512 else 16
    splits = power_of_two(-(-_PROGRAMS // (shape.rows * shape.kv_heads)))
    most = max(1, shape.page_size * shape.max_pages // _KEYS_PER_SPLIT)
    while splits > min(most, _MAX_SPLITS):
        splits //= 2
    stages = 3 if shape.compute_bytes == 2 else 2
    return Tiles(rows=max(16, power_of_two(shape.group)), keys=keys, splits=splits, num_warps=4, num_stages=stages)


def prefill_tiles(shape: Shape) -> Tiles:
    """For rows with many queries: as large as registers and shared memory of sm_80 allow."""
    width = power_of_two(shape.head_dim)
    group = power_of_two(shape.group)
    if shape.compute_bytes == 4:
        return Tiles(rows=max(16, group), keys=32 if width <= 128 else 16, splits=1, num_warps=4, num_stages=1)
    if width <= 128:
        return Tiles(rows=max(128, group), keys=64, splits=1, num_warps=8, num_stages=3)
    return Tiles(rows=max(64, group), keys=32, splits=1, num_warps=8, num_stages=2)
