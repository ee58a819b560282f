"""What is told of loading and warm-up."""

from __future__ import annotations

import io
import sys

import pytest

from jaxpaged.progress import ProgressBars, programs_folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(monkeypatch, stream: io.StringIO, cache: str | None = "/programs") -> str:
    """All that is told of a load."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with ProgressBars(cache) as bars:
        for stage, total in (("load", 3_000_000), ("warm-up", 30)):
            for tenth in range(11):
                bars.update(stage, total * tenth // 10, total)
    assert bars.totals == {"load": 3_000_000, "warm-up": 30}
    return stream.getvalue()


def test_a_log_has_a_line_at_the_start_and_end_of_each_stage(monkeypatch) -> None:
    lines = told(monkeypatch, io.StringIO()).splitlines()
    assert lines[0] == "Loading weights: 3.00MB" and lines[1].startswith("Loading weights: done after 0.")
    assert "not in /programs yet are compiled" in lines[2]
    assert lines[3] == "Preparing programs: 30 programs" and lines[4].startswith("Preparing programs: done after 0.")
    assert len(lines) == 5 and not any("\r" in line for line in lines)


def test_a_log_says_now_and_then_how_far_it_is(monkeypatch) -> None:
    monkeypatch.setattr("jaxpaged.progress._LOG_SECONDS", 0.0)
    lines = told(monkeypatch, io.StringIO()).splitlines()
    assert "Loading weights: 1.50MB of 3.00MB" in lines and "Preparing programs: 12 of 30 programs" in lines
    assert len(lines) == 5 + 2 * 10


def test_a_terminal_has_bars_and_no_guess_when_programs_are_ready(monkeypatch) -> None:
    text = told(monkeypatch, Terminal())
    loading, programs = text.split("Programs that are not in")
    assert "\rLoading weights: 100%" in loading and "B/s" in loading
    assert "Preparing programs: 100%" in programs and "30/30 [00:00]" in programs and "<" not in programs


def test_without_a_cache_every_start_compiles(monkeypatch) -> None:
    assert "Every start compiles" in told(monkeypatch, io.StringIO(), "")


@pytest.mark.parametrize(
    ("option", "variables", "folder"),
    [
        ("", {"JAX_COMPILATION_CACHE_DIR": "/jax"}, "None"),
        ("/own", {"JAX_COMPILATION_CACHE_DIR": "/jax"}, "/own"),
        (None, {"JAX_COMPILATION_CACHE_DIR": "/jax"}, "/jax"),
        (None, {"XDG_CACHE_HOME": "/cache"}, "/cache/jaxpaged/xla"),
        (None, {"HOME": "/home/me"}, "/home/me/.cache/jaxpaged/xla"),
    ],
)
def test_where_programs_are_kept(option, variables, folder, monkeypatch) -> None:
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(programs_folder(option)) == folder
