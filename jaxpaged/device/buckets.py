"""Which padded shapes exist. A step is padded to a bucket, and every bucket is one compiled forward pass.

The closer buckets are, the less is padding, and the more there is to compile at start-up: see `SPACINGS`. Between two
mixed ones the scheduler cuts prompts so that they fill the smaller one (`StepSizes`); decodes it never holds back.

Sampling has programs of its own, which know no tokens, only rows. They are many branches and slow to compile, so
buckets of similar numbers of rows share one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple


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


@dataclass(frozen=True)
class Spacing:
    """A platform's buckets: the larger of these sizes are left out where limits are lower, or doubled where higher.

    Attributes:
      rows: of decode-only ones.
      tokens: of mixed ones.
      step_cost: what a step costs besides its tokens, in tokens of a large one.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    step_cost: int


_GPU_ROWS = (1, 2, 3, 4, *range(6, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16))
_GPU_ROWS += (*range(128, 256, 32), *range(256, 512, 64), *range(512, 1025, 128))
_MIXED = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

SPACINGS = {
    "cpu": Spacing((1, 4, 8, 16, 24, 32), (32, 64, 128, 256), step_cost=20),
    "gpu": Spacing(_GPU_ROWS, _MIXED, step_cost=200),
    "tpu": Spacing((8, 16, 24, 32, 48, 64, 96, 128, 192, 256), _MIXED, step_cost=200),
}
"""By platform.

A program costs CPUs about ten CPU-seconds at the first start, and a row of padding a millisecond a step: a few buckets,
where they save most. 24 rows beside 16 and 32 save 5 % of the time under a load of 10 to 20 requests.

GPUs hardly notice a few rows more, but a hundred. With powers of two (19 programs for the default limits) 24 to 32 % of
the tokens computed under Poisson arrivals are padding, and up to 19 % of the time; with these (39) 7 to 8 %, and at
most 4 % of the time (`python -m benchmarks.padding`). Mixed ones may be farther apart than the others, since prompts
are cut to fit.
"""


class ResultSizes(NamedTuple):
    """What the results of a bucket's forward pass are padded to, so that few programs can read them.

    Attributes:
      logits: R, rows of logits.
      hidden: rows of hidden states.
    """

    logits: int
    hidden: int


class BucketTable:
    """The buckets of an engine, smallest first, and the choice among them.

    Decode-only buckets have one token a row; mixed ones hold fewer rows than tokens, so that the two kinds never
    coincide.

    Attributes:
      sample_rows: R of each sampling program, smallest first: at most twice the rows of any decode-only bucket that it
        serves.
      hidden_rows: rows of hidden states of mixed buckets, smallest first; those of others are read by no program.
      step_cost: as of `Spacing`.
    """

    def __init__(self, decode_rows: Iterable[int], mixed_tokens: Iterable[int], max_num_seqs: int, step_cost: int = 0):
        self.max_num_seqs, self.step_cost = max_num_seqs, step_cost
        self.decode = [Bucket(n, n) for n in sorted(set(decode_rows))]
        self.mixed = [Bucket(n, min(n - 1, max_num_seqs)) for n in sorted(set(mixed_tokens))]
        rows = {bucket.rows for bucket in self.decode} | {max(bucket.rows for bucket in self.all)}
        self.sample_rows = _at_least_halved(sorted(rows))
        self.hidden_rows = _at_least_halved(self.mixed_tokens())

    @property
    def all(self) -> list[Bucket]:
        return self.decode + self.mixed

    @property
    def first(self) -> Bucket:
        """The smallest one in which all requests can run, if prompts are cut to fit."""
        return next(bucket for bucket in self.mixed if bucket.rows == self.max_num_seqs)

    def mixed_tokens(self, unready: Container[Bucket] = ()) -> list[int]:
        """Sizes of the mixed buckets that can be used, smallest first."""
        return [bucket.tokens for bucket in self.mixed if bucket not in unready]

    def pick(self, num_rows: int, num_tokens: int, unready: Container[Bucket] = (), *, mixed: bool = False) -> Bucket:
        """The smallest bucket that holds `num_tokens` tokens in `num_rows` rows (each has at least one).

        Args:
          unready: those that cannot be used.
          mixed: it is not to be a decode-only one.
        """
        for bucket in self.all if num_tokens == num_rows and not mixed else self.mixed:
            if bucket not in unready and num_rows <= bucket.rows and num_tokens <= bucket.tokens:
                return bucket
        raise AssertionError(f"no bucket for {num_rows} rows and {num_tokens} tokens in {self.all}")

    def result_sizes(self, bucket: Bucket) -> ResultSizes:
        """Those of the smallest programs that hold a bucket's results."""
        logits = next(n for n in self.sample_rows if n >= bucket.rows)
        hidden = bucket.tokens if bucket.decode_only else next(n for n in self.hidden_rows if n >= bucket.tokens)
        return ResultSizes(logits, hidden)


def bucket_table(
    max_num_seqs: int, max_num_batched_tokens: int, platform: str, *, min_decode_rows: int = 1
) -> BucketTable:
    """A platform's buckets up to the limits, which are buckets themselves.

    Args:
      platform: "cpu", "gpu" or "tpu".
      min_decode_rows: smallest decode batch; where products with few rows are slow, padding them is faster.
    """
    spacing = SPACINGS[platform]
    decode = _up_to(max(min_decode_rows, max_num_seqs), spacing.rows)
    mixed = _up_to(max(max_num_batched_tokens, max_num_seqs + 1), spacing.tokens)
    return BucketTable((n for n in decode if n >= min_decode_rows), mixed, max_num_seqs, spacing.step_cost)


def least_decode_rows(platform: str, dtype: str) -> int:
    """The smallest decode batch worth a bucket: XLA:CPU is slower with a few rows of bfloat16 than with eight."""
    return 8 if platform == "cpu" and dtype != "float32" else 1


def _up_to(last: int, sizes: tuple[int, ...]) -> list[int]:
    """Those of `sizes` and of the doublings of their largest that are below `last`, and `last`."""
    while sizes[-1] < last:
        sizes = *sizes, 2 * sizes[-1]
    return [*(n for n in sizes if n < last), last]


def _at_least_halved(sizes: list[int]) -> list[int]:
    """The largest of `sizes`, and going down each that is less than half of the one kept before it."""
    kept = [sizes[-1]]
    for n in reversed(sizes):
        if 2 * n < kept[0]:
            kept.insert(0, n)
    return kept
