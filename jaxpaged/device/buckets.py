"""Which padded shapes exist. A step is padded to a bucket, and every bucket is one compiled forward pass.

Sampling has programs of its own, which know no tokens, only rows. They are many branches and slow to compile, so
buckets of similar numbers of rows share one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """A padded step shape.

    Attributes:
      tokens: T, packed tokens.
      rows: S, request rows. `rows == tokens` means decode-only: every live row has exactly one token.
    """

    tokens: int
    rows: int

    @property
    def decode_only(self) -> bool:
        return self.tokens == self.rows

    def max_new_blocks(self, block_size: int) -> int:
        """Upper bound of the blocks that one step of this shape can add to block tables."""
        return self.rows + -(-self.tokens // block_size)


class BucketTable:
    """The buckets of an engine, smallest first, and the choice among them.

    Decode-only buckets have one token a row; mixed ones hold at least twice as many tokens as rows, so that
    the two kinds never coincide.

    Attributes:
      sample_rows: R of each sampling program, smallest first: at most twice the rows of any bucket that it serves.
    """

    def __init__(self, decode_rows: list[int], mixed_tokens: list[int], max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.decode = [Bucket(n, n) for n in sorted(set(decode_rows))]
        self.mixed = [Bucket(n, min(max(n // 2, 1), max_num_seqs)) for n in sorted(set(mixed_tokens))]
        self.sample_rows = _at_least_halved(sorted({bucket.rows for bucket in self.all}))

    @property
    def all(self) -> list[Bucket]:
        return self.decode + self.mixed

    def pick(self, num_rows: int, num_tokens: int) -> Bucket:
        """The smallest bucket that holds `num_tokens` tokens in `num_rows` rows (each has at least one)."""
        for bucket in self.decode if num_tokens == num_rows else self.mixed:
            if num_rows <= bucket.rows and num_tokens <= bucket.tokens:
                return bucket
        raise AssertionError(f"no bucket for {num_rows} rows and {num_tokens} tokens in {self.all}")

    def num_logits(self, bucket: Bucket) -> int:
        """R, the rows of logits that a bucket yields: those of the smallest sampling program that holds its rows."""
        return next(n for n in self.sample_rows if n >= bucket.rows)


def bucket_table(max_num_seqs: int, max_num_batched_tokens: int, *, min_decode_rows: int = 1) -> BucketTable:
    """Powers of two up to the limits, which are buckets themselves.

    The second smallest of each kind is left out: a program costs seconds at start-up, and padding 2 rows to 4, or 32
    tokens to 64, costs little.

    Args:
      min_decode_rows: smallest decode batch; where products with few rows are slow, padding them is faster.
    """
    decode = _powers_of_two(min_decode_rows, max(min_decode_rows, max_num_seqs))
    mixed = _powers_of_two(16, max(max_num_batched_tokens, 2 * max_num_seqs))
    return BucketTable(_without(decode, 2), _without(mixed, 32), max_num_seqs)


def _powers_of_two(first: int, last: int) -> list[int]:
    """`first` and its doublings below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _without(sizes: list[int], dropped: int) -> list[int]:
    """`sizes` without `dropped`, unless it is the largest."""
    return [n for n in sizes if n != dropped or n == sizes[-1]]


def _at_least_halved(sizes: list[int]) -> list[int]:
    """The largest of `sizes`, and going down each that is less than half of the one kept before it."""
    kept = [sizes[-1]]
    for n in reversed(sizes):
        if 2 * n < kept[0]:
            kept.insert(0, n)
    return kept
