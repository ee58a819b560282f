"""How the work is cut into programs and loop iterations: as measured, or by rules of thumb where nothing is on file."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from pallas_kernels import tuning
from pallas_kernels.padding import power_of_two
from pallas_kernels.stored import casts_e4m3


@dataclass(frozen=True)
class Tiles:
    """What a kernel's speed depends on and its result does not.

    Attributes:
      rows: (query, head) pairs of one KV head per program: the M of its products; a power of two, at least 16.
      keys: per loop iteration; a power of two, at least 16.
      splits: programs that share one row's keys, a power of two; their results are merged by a second launch.
      num_warps, num_stages: of the program. Page numbers are read a stage before the pages: of 3 stages one is a tile
        of keys in flight, of 5 stages two are.
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


_FIELDS = ("kv_heads", "group", "head_dim", "pool_dtype", "compute_bytes", "page_size")
_CORES = 148  # of a large GPU (132 to 148): so many programs are not split, for a merge is a launch more
_BUSY = 256  # programs that keep it busy: fewer than one a core are split until they are about as many
_RESIDENT = 384  # programs of two tiles in flight that fit on it at once, 3 to a core
_KEYS_PER_SPLIT = 256  # at least: a split's result costs about as much to write and read as this many keys
_MAX_SPLITS = 64


def decode_tiles(shape: Shape) -> Tiles:
    """For rows with one query each. How long contexts may be says little of how long they are: no key for entries."""
    return _look_up("decode", shape, {"rows": shape.rows}, _decode_default)


def prefill_tiles(shape: Shape) -> Tiles:
    """For rows with more queries."""
    return _look_up("prefill", shape, {"tokens": shape.tokens}, _prefill_default)


def _look_up(kernel: str, shape: Shape, sizes: dict[str, int], default: Callable[[Shape], Tiles]) -> Tiles:
    rule = asdict(default(shape))
    key = {name: getattr(shape, name) for name in _FIELDS} | sizes
    tiles = {**rule, **tuning.lookup("ragged_paged_attention", kernel, key, rule)}
    sizes_right = all(tiles[name] == power_of_two(tiles[name]) for name in rule if name != "num_stages")
    if set(tiles) != set(rule) or not sizes_right or tiles["num_stages"] < 1 or min(tiles["rows"], tiles["keys"]) < 16:
        raise ValueError(f"the tuned tiles of {kernel} for {tuning.current_device()} make no sense: {tiles}")
    return Tiles(**{**tiles, "rows": max(tiles["rows"], power_of_two(shape.group))})


def _decode_default(shape: Shape) -> Tiles:
    """Short of nothing but bandwidth, so: many loads in flight."""
    width = power_of_two(shape.head_dim)
    programs = shape.rows * shape.kv_heads
    splits = power_of_two(-(-_BUSY // programs)) if programs < _CORES else 1
    most = max(1, shape.page_size * shape.max_pages // _KEYS_PER_SPLIT)
    while splits > min(most, _MAX_SPLITS):
        splits //= 2
    rows = max(16, power_of_two(shape.group))
    if shape.compute_bytes == 4:
        return Tiles(rows, keys=32 if width <= 64 else 16, splits=splits, num_warps=4, num_stages=1)
    if rows > 32:
        return Tiles(rows, keys=32, splits=splits, num_warps=8, num_stages=3)
    # Fewer stages leave room for more programs, which hide each other's waits as well.
    deep = programs * splits <= _RESIDENT and width <= 128 and shape.pool_dtype in ("bfloat16", "float16", "uint16")
    return Tiles(rows, keys=64 if width <= 128 else 32, splits=splits, num_warps=4, num_stages=5 if deep else 3)


def _prefill_default(shape: Shape) -> Tiles:
    """As large as registers and shared memory allow; chips without casts of 8-bit numbers need registers for these."""
    width = power_of_two(shape.head_dim)
    group = power_of_two(shape.group)
    if shape.compute_bytes == 4:
        return Tiles(max(16, group), keys=16, splits=1, num_warps=4, num_stages=3 if width <= 128 else 2)
    if shape.pool_dtype in ("int8", "float8_e4m3fn", "float8_e5m2") and not casts_e4m3(tuning.current_device()):
        stages = 3 if width == shape.head_dim <= 128 else 1
        return Tiles(max(64, group), keys=32, splits=1, num_warps=8, num_stages=stages)
    if width <= 128:
        # Dividing by another group than a power of two takes registers.
        keys = 64 if group == shape.group else 32
        return Tiles(max(128, group), keys=keys, splits=1, num_warps=8, num_stages=3)
    return Tiles(max(64, group), keys=32, splits=1, num_warps=8, num_stages=3)
