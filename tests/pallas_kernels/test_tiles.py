"""How the work is cut where nothing is on file."""

from dataclasses import replace

from pallas_kernels.ragged_paged_attention.tiles import Shape, decode_tiles

SHAPE = Shape(
    tokens=64,
    rows=64,
    kv_heads=3,
    group=3,
    head_dim=64,
    pool_dtype="bfloat16",
    compute_bytes=2,
    page_size=16,
    max_pages=512,
)


def test_keys_are_split_where_there_are_fewer_programs_than_cores():
    splits = {rows: decode_tiles(replace(SHAPE, rows=rows)).splits for rows in (1, 10, 49, 50, 64)}
    assert splits == {1: 32, 10: 16, 49: 2, 50: 1, 64: 1}, "3 programs a row, 32 splits of 256 keys at most"
