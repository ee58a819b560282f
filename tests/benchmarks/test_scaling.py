"""The scaling curves: what is measured within a time, and the picture of it."""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, scaling
from tests.benchmarks.fake_peer import FakePeer

FLAGS = "--requests 1 4 --tokens 16 64 --short 8 --steps 10"


class Clock:
    """Time that passes only where a fake engine says that it does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def seconds(self, factor: float = 1.0):
        """A run that takes `factor` seconds for each token, in or out."""

        def run(work: Mapping[str, Any]) -> float:
            seconds = factor * work["num_prompts"] * (work["own_len"] + work["output_len"])
            self.now += seconds
            return seconds

        return run


def measured(clock: Clock, fakes: list[FakePeer], flags: str) -> list[dict[str, Any]]:
    args = scaling.arguments(f"{FLAGS} {flags}".split())
    todo = scaling.points(args)
    scaling.measure(fakes, todo, args, clock)
    return scaling.rows(fakes, todo)


def test_every_point_is_measured_and_cheap_ones_again_while_there_is_time() -> None:
    clock = Clock()
    fakes = [FakePeer("jaxpaged", clock.seconds()), FakePeer("vllm", clock.seconds())]
    # One round is 2 * (16 + 64 + 27 + 75) = 364 s; 120 more are two more of the smallest point and one of the next.
    rows = measured(clock, fakes, f"--minutes {484 / 60} --longest 1000")
    times = {row["job"]: len(row["seconds"]) for row in rows if row["engine"] == "vllm"}
    assert times == {"1x8+8": 2, "4x8+8": 1, "1x16+11": 1, "1x64+11": 1}, "first runs do not count if there are others"
    assert clock.now == 364 + 2 * 32 + 54
    assert [row["job"] for row in rows if row["curve"] == "requests"] == ["1x8+8", "4x8+8"] * 2


@pytest.mark.parametrize(("minutes", "counted"), [(10_000, [16, 64, 27, 75]), (33, [16, 640, 270, 750])])
def test_a_first_run_counts_only_where_it_is_the_only_one(minutes: float, counted: list[float]) -> None:
    """An engine takes ten times as long for its first run of each point: 1,820 s for all of them."""
    clock, seen = Clock(), set()

    def run(work: Mapping[str, Any]) -> float:
        point = work["num_prompts"], work["own_len"]
        factor = 1.0 if point in seen else 10.0
        seen.add(point)
        return clock.seconds(factor)(work)

    rows = measured(clock, [FakePeer("vllm", run)], f"--minutes {minutes} --longest 1000")
    assert [set(row["seconds"]) for row in rows] == [{seconds} for seconds in counted]


def test_no_point_is_measured_more_often_than_asked() -> None:
    clock = Clock()
    rows = measured(clock, [FakePeer("jaxpaged", clock.seconds())], "--minutes 1000 --longest 1000 --repeat 3")
    assert [len(row["seconds"]) for row in rows] == [3] * 4


def test_a_slow_engine_goes_no_further_on_that_curve_and_the_others_do() -> None:
    clock = Clock()
    fakes = [FakePeer("jaxpaged", clock.seconds()), FakePeer("transformers", clock.seconds(2.0))]
    rows = measured(clock, fakes, "--minutes 1000 --longest 50 --repeat 2")
    points = {(row["job"], len(row["seconds"])) for row in rows if row["engine"] == "transformers"}
    assert points == {("1x8+8", 2), ("4x8+8", 2), ("1x16+11", 2)}
    assert len([row for row in rows if row["engine"] == "jaxpaged"]) == 4


def test_an_engine_that_dies_keeps_what_it_did() -> None:
    clock = Clock()
    fakes = [FakePeer("jaxpaged", clock.seconds()), FakePeer("vllm", clock.seconds(), dies_at="4x8+8")]
    rows = measured(clock, fakes, "--minutes 1000 --longest 1000 --repeat 1")
    assert {row["job"] for row in rows if row["engine"] == "vllm"} == {"1x8+8", "1x16+11"}


def test_it_ends_when_every_engine_has_died() -> None:
    clock = Clock()
    rows = measured(clock, [FakePeer("vllm", clock.seconds(), dies_at="1x8+8, 1")], "--minutes 1000 --longest 1000")
    assert [len(row["seconds"]) for row in rows] == [1] * 4


def test_pictures_are_pngs_that_name_their_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    clock = Clock()
    fakes = [FakePeer("jaxpaged", clock.seconds()), FakePeer("vllm", clock.seconds(2.0))]
    rows = measured(clock, fakes, "--minutes 1000 --longest 1000 --repeat 1")
    settings = {"model": "demo", "dtype": "float32", "short": 8}
    record.save(record.record("scaling", rows, **settings), tmp_path / "scaling.json")
    scaling.draw(json.loads((tmp_path / "scaling.json").read_text()), tmp_path / "scaling.json")
    light, dark = (chunks(tmp_path / f"scaling-{theme}.png") for theme in ("light", "dark"))
    for picture in (light, dark):
        assert picture[b"tEXt"] == b"Title\0jaxpaged 0.1, vllm 0.1"
        width, height = struct.unpack(">II", picture[b"IHDR"][:8])
        assert width >= 1200 and height >= 400
    assert light[b"IDAT"] != dark[b"IDAT"]


def chunks(path: Path) -> dict[bytes, bytes]:
    """The parts of a PNG by kind, checked."""
    data, found = path.read_bytes(), {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        found[kind] = found.get(kind, b"") + body
        at += 12 + length
    assert kind == b"IEND"
    return found
