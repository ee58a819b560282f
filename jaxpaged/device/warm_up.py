"""Compiles the programs of a runner before requests need them, and runs them for the first time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jaxpaged.device.buckets import Bucket, BucketTable

logger = logging.getLogger(__name__)

# Of the thread that compiles while the engine serves: seconds that it leaves to the first request, which often comes at
# once, and its niceness.
_PAUSE, _NICE = 2.0, 10
# A run on padding of more seconds is the last: a request may have to wait for it, or, longer still, for a larger one.
# Alone on its cores the largest bucket of a small model takes a second; compiling beside it takes the cores too.
_LONGEST = 5.0

Progress = Callable[[int, int], None]  # (done, total)


class Warmable(Protocol):
    """What a warm-up needs of a runner."""

    @property
    def buckets(self) -> BucketTable: ...
    def bucket_programs(self, buckets: Sequence[Bucket]) -> list[Callable[[], Any]]: ...
    def other_programs(self) -> list[Callable[[], Any]]: ...
    def run_padding(self, buckets: Sequence[Bucket]) -> None: ...


class WarmUp:
    """Compiles a runner's programs, from now on, in threads: the weights may be read meanwhile.

    Leaving it as a context manager without `finish` drops what is not compiled yet.

    Args:
      gradually: wait only for those of the first bucket that all requests can run in, and run that alone; the others
        are compiled in a thread, and used as they come.

    Attributes:
      unready: buckets that a thread is about to compile the programs of, in its order.
      unused: buckets that have not run, and may on padding; those that run otherwise are to be taken out.
    """

    def __init__(self, runner: Warmable, *, gradually: bool = False):
        buckets = runner.buckets
        self._runner: Warmable | None = runner  # whose attribute this is: let go of at the end
        self._awaited = [buckets.first] if gradually else buckets.all
        small_first = itertools.chain(*itertools.zip_longest(buckets.decode, buckets.mixed))
        # Before those that save padding: whole steps of prompts, and any number of decodes.
        in_order = dict.fromkeys((buckets.mixed[-1], buckets.decode[-1], *small_first))
        self.unused = set(buckets.all)
        self.unready = tuple(bucket for bucket in in_order if bucket and bucket not in self._awaited)
        self._goes_on = False  # whether a thread does
        needed = [*runner.bucket_programs(self._awaited), *runner.other_programs()]
        # XLA compiles outside the GIL: two at a time halve the wait, more would only contend for memory.
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="jaxpaged-warm-up")
        self._pending = [self._pool.submit(compile_one) for compile_one in needed]

    def __enter__(self) -> WarmUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, progress: Progress | None = None) -> None:
        """Waits for what is to be waited for, runs those buckets once on padding unless this is a CPU, then goes on.

        Raises:
          Exception: what compiling raised.
        """
        with self:
            if progress:
                progress(0, len(self._pending))
            for done, future in enumerate(concurrent.futures.as_completed(self._pending), 1):
                future.result()
                if progress:
                    progress(done, len(self._pending))
        (runner, self._runner), self._pending = (self._runner, None), []
        assert runner is not None, "finished twice"
        if jax.default_backend() != "cpu":  # where it is by far the most that a first run takes
            runner.run_padding(self._awaited)
            self.unused.difference_update(self._awaited)
        if self.unready:
            self._goes_on = True
            thread = threading.Timer(_PAUSE, self._go_on, (runner,))
            thread.name, thread.daemon = "jaxpaged-warm-up", True
            thread.start()

    def use_one(self, runner: Warmable) -> bool:
        """Runs the smallest bucket that has not run, on padding; to be called while no request is there.

        A first run takes what later ones do not: a GPU loads the code, XLA:CPU plans each product (half a second a
        program of 30 layers). Returns whether any are left, even if they are only being compiled.
        """
        going_on, unready = self._goes_on, self.unready  # in this order: when the thread ends, the second is settled
        left = sorted(bucket for bucket in self.unused if going_on or bucket not in unready)
        if not left:
            return False
        if left[0] in unready:
            return True  # the thread is about to compile it
        begin = time.monotonic()
        runner.run_padding(left[:1])
        self.unused.remove(left[0])
        if (seconds := time.monotonic() - begin) > _LONGEST:
            logger.info("%s took %.1f s on padding: larger ones run for the first time with requests", left[0], seconds)
            self.unused.clear()
        return bool(self.unused) and len(left) > 1

    def _go_on(self, runner: Warmable) -> None:
        """Compiles the programs of buckets that are not ready, one after the other. Without one the engine can do."""
        with contextlib.suppress(AttributeError, OSError):  # Linux has priorities of threads: steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            for bucket in self.unready:
                self._compile(runner, bucket)
        finally:
            self._goes_on = False

    def _compile(self, runner: Warmable, bucket: Bucket) -> None:
        try:
            for compile_one in runner.bucket_programs([bucket]):
                compile_one()
        except Exception:
            logger.exception("the programs of %s cannot be compiled; others are used instead", bucket)
        else:
            self.unready = tuple(other for other in self.unready if other != bucket)


def cold_programs(buckets: BucketTable, warm: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Which programs are not compiled, given those that are: kind -> sizes, as `Runner.warm_programs`."""
    every = {
        "decoding, by requests": [bucket.rows for bucket in buckets.decode],
        "forward, by tokens": [bucket.tokens for bucket in buckets.mixed],
        "sampling, by rows": buckets.sample_rows,
        "prompt logprobs, by tokens": buckets.hidden_rows,
        "pooling, by tokens": buckets.hidden_rows,
    }
    return {kind: [size for size in sizes if size not in warm[kind]] for kind, sizes in every.items()}
