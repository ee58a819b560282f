"""Forward passes by bucket: which are needed, and what the largest takes."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpaged.device import forward_programs
from jaxpaged.device.buckets import Bucket, BucketTable
from jaxpaged.device.forward_programs import ForwardPrograms
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.step_program import abstract

BUCKETS = BucketTable([1, 4], [8, 16], max_num_seqs=4)


@pytest.fixture
def make(runner, monkeypatch):
    """For so many decode steps at once; compiling is looking up what a program takes."""

    def make(max_decode_steps: int, step: tuple[int, int] = (0, 0), loop: tuple[int, int] = (0, 0)) -> ForwardPrograms:
        taken = {"forward": step, "decode": loop}
        monkeypatch.setattr(ProgramStore, "program", lambda _, name, *__: name)
        monkeypatch.setattr(forward_programs, "program_bytes", lambda name: taken[name.split()[0]])
        config = dataclasses.replace(runner.config, max_decode_steps=max_decode_steps)
        state = abstract((runner.params, runner.slots, runner.options))
        return ForwardPrograms(runner.module, runner.step_options, config, BUCKETS, state, ProgramStore())

    return make


@pytest.mark.parametrize(("max_steps", "of_one"), [(1, BUCKETS.all), (8, BUCKETS.mixed)])
def test_a_cpu_needs_one_program_for_each_bucket(make, runner, max_steps, of_one):
    """The loop does single steps as well there."""
    forwards = make(max_steps)
    for compile_one in forwards.needed(BUCKETS.all, runner.kv_pages):
        compile_one()
    assert list(forwards.programs) == of_one[::-1]
    assert {*forwards.programs, *forwards.decode_programs} == {*BUCKETS.all}


def test_the_loop_of_decode_steps_counts_where_it_takes_more(make, runner):
    assert make(1, step=(3, 4), loop=(50, 50)).step_bytes(runner.kv_pages) == 7, "there is none"
    assert make(8, step=(3, 4), loop=(5, 6)).step_bytes(runner.kv_pages) == 11
    assert make(8, step=(30, 4), loop=(5, 6)).step_bytes(runner.kv_pages) == 34


def test_a_program_is_compiled_once(make, runner):
    forwards = make(8)
    assert forwards.program(Bucket(16, 4), runner.kv_pages) is forwards.program(Bucket(16, 4), runner.kv_pages)
    assert forwards.decode_program(Bucket(4, 4), runner.kv_pages).startswith("decode")
