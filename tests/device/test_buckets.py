import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.device.buckets import Bucket, bucket_table


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 8]), st.data())
def test_every_step_within_the_limits_has_a_bucket(seqs, tokens, few, data):
    tokens = max(tokens, seqs)
    table = bucket_table(seqs, tokens, min_decode_rows=few)
    rows = data.draw(st.integers(1, seqs))
    total = data.draw(st.integers(rows, tokens))
    bucket = table.pick(rows, total)
    assert bucket.rows >= rows and bucket.tokens >= total
    assert bucket.decode_only == (rows == total)
    assert bucket.rows <= table.num_logits(bucket) <= 2 * bucket.rows


def test_sampling_programs_are_shared():
    assert bucket_table(256, 8192).sample_rows == [1, 4, 16, 64, 256]
    assert bucket_table(32, 256).sample_rows == [1, 8, 32]
    assert bucket_table(1, 16).sample_rows[-1] == 1


def test_mixed_buckets_are_never_taken_for_decode_only():
    for seqs, tokens in [(1, 1), (1, 2), (8, 8), (32, 512), (256, 8192)]:
        assert not any(b.decode_only for b in bucket_table(seqs, tokens).mixed)


def test_few_buckets():
    assert len(bucket_table(256, 8192).all) <= 20


def test_new_blocks_bound():
    assert Bucket(16, 8).max_new_blocks(16) == 9
    with pytest.raises(AssertionError, match="no bucket"):
        bucket_table(2, 16).pick(3, 3)
