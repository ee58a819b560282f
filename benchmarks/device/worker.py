"""Runs one stage of the device check and reports item by item.

Every item is announced before it begins and its row is on file as soon as it ends, so that an item which kills the
process, or never ends, costs itself alone: the next worker of the stage is told what to leave out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

DEVICE_BROKEN = 3  # exit status


@dataclass(frozen=True)
class Context:
    """What a stage is told.

    Attributes:
      tiny: small shapes, on any device.
      implementation: of the kernels.
      known: rows of the stages before.
      scratch: a folder for files.
      keep: a folder for files that the user should get; None: there is none.
    """

    tiny: bool
    implementation: str
    known: list[dict[str, Any]]
    scratch: Path
    keep: Path | None

    def fact(self, name: str, field: str) -> float | None:
        """A number from an earlier row, if it was measured."""
        return next((row.get(field) for row in self.known if row["name"] == name and field in row), None)

    def kernel_options(self) -> dict[str, Any]:
        """Options that choose the implementation of an operation."""
        import jax

        interpret = self.implementation in ("gpu", "tpu") and jax.default_backend() == "cpu"
        return {"implementation": self.implementation, "interpret": interpret}


class Report:
    """The rows of a stage.

    Args:
      path: file that gets a line of JSON for each item begun and each row.
      skip: items that an earlier worker has done, or died of.
      seconds: after which no further item begins.
      careful: nothing is compiled before its item begins, so that it is known what a compiler died of.
    """

    def __init__(self, path: Path, skip: list[str], seconds: float, *, careful: bool = False):
        self._path, self._skip, self._careful = path, set(skip), careful
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def run(self, name: str, measure: Callable[[], Mapping[str, Any]], *, needs: float = 0.0) -> dict[str, Any] | None:
        """Does one item and writes its row: what `measure` returns, or why there is nothing.

        Args:
          needs: seconds that it takes, about.

        Returns:
          The row, None if there is nothing.
        """
        if name in self._skip:
            return None
        if self.seconds_left < needs:
            self._write({"name": name, "skipped": "no time left"})
            return None
        self._write({"begin": name})
        start = time.monotonic()
        try:
            row = {"name": name, **measure()}
        except (NotImplementedError, ImportError) as error:
            self._write({"name": name, "skipped": f"{type(error).__name__}: {_first_line(error)}"})
            return None
        except Exception as error:
            traceback.print_exc()
            self._write({"name": name, "error": f"{type(error).__name__}: {_first_line(error)}"})
            self._check_device()
            return None
        self._write({**row, "took_s": round(time.monotonic() - start, 2)})
        return row

    def run_prepared(self, items: Mapping[str, Callable[[], Callable[[], Mapping[str, Any]]]], *, threads: int) -> None:
        """Does items that compile first, side by side, and then run one at a time.

        Args:
          items: name -> what compiles and returns what runs.
        """
        todo = {name: prepare for name, prepare in items.items() if name not in self._skip}
        if self._careful:
            for name, prepare in todo.items():
                self.run(name, lambda prepare=prepare: prepare()(), needs=1.0)
            return
        pool = concurrent.futures.ThreadPoolExecutor(threads)
        prepared = {name: pool.submit(prepare) for name, prepare in todo.items()}
        for name, future in prepared.items():
            left = max(0.0, self.seconds_left)
            self.run(name, lambda future=future, left=left: future.result(timeout=left)(), needs=0.5)
        pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _check_device(self) -> None:
        """After some errors nothing runs any more in this process: ends it, for another to go on."""
        if "jax" not in sys.modules:
            return
        import jax
        import jax.numpy as jnp

        try:
            jax.block_until_ready(jnp.arange(3) + 1)
        except Exception:
            os._exit(DEVICE_BROKEN)  # the ordinary way out would wait for the device


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The rows that workers wrote, and the item that was begun and never ended."""
    if not path.exists():
        return [], None
    rows, begun = [], None
    for text in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line cut short
            line = json.loads(text)
            begun = line.get("begin")
            if begun is None:
                rows.append(line)
    return rows, begun


def waits_for(path: Path) -> float:
    """Seconds since the last item was begun, if it has not ended."""
    if read(path)[1] is None:
        return 0.0
    return time.time() - path.stat().st_mtime


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON: module, rows, skip, seconds, and the fields of Context")
    job = json.loads(parser.parse_args().job)
    known = json.loads(Path(job["known"]).read_text(encoding="utf-8"))
    context = Context(
        tiny=job["tiny"],
        implementation=job["implementation"],
        known=known,
        scratch=Path(job["scratch"]),
        keep=Path(job["keep"]) if job["keep"] else None,
    )
    report = Report(Path(job["rows"]), job["skip"], job["seconds"], careful=bool(job["skip"]))
    try:
        stage = importlib.import_module(job["module"])
    except ImportError as error:
        report.run("import", partial(_raise, error))
    else:
        stage.run(report, context)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what still compiles for an item that had no time left is not waited for


def _raise(error: Exception) -> Mapping[str, Any]:
    raise error


if __name__ == "__main__":
    main()
