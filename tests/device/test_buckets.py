import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.device.buckets import SPACINGS, Bucket, BucketTable, bucket_table


@given(
    st.integers(1, 3000), st.integers(1, 20_000), st.sampled_from(sorted(SPACINGS)), st.sampled_from([1, 8]), st.data()
)
def test_every_step_within_the_limits_has_a_bucket(seqs, tokens, platform, few, data):
    tokens = max(tokens, seqs)
    table = bucket_table(seqs, tokens, platform, min_decode_rows=few)
    rows = data.draw(st.integers(1, seqs))
    total = data.draw(st.integers(rows, tokens))
    bucket = table.pick(rows, total)
    assert bucket.rows >= rows and bucket.tokens >= total
    assert bucket.decode_only == (rows == total)
    assert bucket.rows <= table.result_sizes(bucket).logits
    assert not bucket.decode_only or table.result_sizes(bucket).logits <= 2 * bucket.rows
    mixed = table.pick(rows, total, mixed=True)
    assert not mixed.decode_only and mixed.rows >= rows and mixed.tokens >= total
    assert table.result_sizes(mixed).hidden in table.hidden_rows and table.result_sizes(mixed).hidden >= mixed.tokens


@pytest.mark.parametrize(
    ("seqs", "tokens", "platform", "few", "rows"),
    [(256, 8192, "gpu", 1, [1, 3, 8, 20, 48, 112, 256]), (32, 256, "cpu", 1, [1, 8, 32]), (32, 256, "cpu", 8, [8, 32])],
)
def test_sampling_programs_are_shared(seqs, tokens, platform, few, rows):
    assert bucket_table(seqs, tokens, platform, min_decode_rows=few).sample_rows == rows


def test_the_limits_are_buckets():
    for platform in SPACINGS:
        for seqs, tokens in [(1, 1), (1, 2), (8, 8), (33, 500), (256, 8192), (5000, 40_000)]:
            table = bucket_table(seqs, tokens, platform)
            assert table.decode[-1] == Bucket(seqs, seqs)
            assert table.mixed[-1].tokens == max(tokens, seqs + 1) and table.mixed[-1].rows == seqs


def test_mixed_buckets_are_never_taken_for_decode_only():
    for seqs, tokens in [(1, 1), (1, 2), (8, 8), (32, 512), (256, 8192)]:
        assert not any(b.decode_only for b in bucket_table(seqs, tokens, "gpu").mixed)


def test_tokens_alone_decide_how_much_a_mixed_step_is_padded():
    """What `StepSizes` relies on."""
    table = bucket_table(256, 8192, "gpu")
    for rows, tokens in [(31, 32), (200, 201), (256, 257), (2, 250)]:
        assert table.pick(rows, tokens) == next(b for b in table.mixed if b.tokens >= tokens)


@pytest.mark.parametrize(("platform", "few", "most"), [("cpu", 8, 8), ("cpu", 1, 10), ("tpu", 1, 25), ("gpu", 1, 40)])
def test_few_buckets(platform, few, most):
    seqs, tokens = (32, 256) if platform == "cpu" else (256, 8192)
    assert len(bucket_table(seqs, tokens, platform, min_decode_rows=few).all) <= most


@pytest.mark.parametrize("few", [1, 8])
def test_fewer_than_25_programs_on_a_cpu(few):
    """By default: those of the buckets, and two to admit requests, one to copy blocks, one to score prompts."""
    table = bucket_table(32, 256, "cpu", min_decode_rows=few)
    assert len(table.all) + 2 * len(table.sample_rows) + 2 * len(table.hidden_rows) + 4 < 25


def test_new_blocks_bound():
    assert Bucket(16, 8).max_new_blocks(16) == 9
    with pytest.raises(AssertionError, match="no bucket"):
        BucketTable([2], [16], max_num_seqs=2).pick(3, 3)
