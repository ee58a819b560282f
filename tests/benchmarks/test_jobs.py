"""Jobs as they are written, and the room that they need."""

import pytest

from benchmarks.jobs import Job, limits
from benchmarks.peer_worker import prompts


@pytest.mark.parametrize("text", ["32x128+128", "1x1+1", "32x1024:64+128"])
def test_a_job_is_written_as_it_is_read(text: str) -> None:
    assert str(Job.parse(text)) == text


@pytest.mark.parametrize("text", ["", "32", "32x128", "x128+128", "32x128+128 ", "0x1+1", "1x0+1", "1x8:0+1", "1x1+0"])
def test_what_is_no_job_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r}".replace("+", r"\+")):
        Job.parse(text)


def test_a_title_says_it_in_words() -> None:
    assert Job.parse("1x8+4").title == "1 request, 8 in, 4 out"
    assert Job.parse("32x1024:64+128").title == "32 requests, 1024 shared + 64 in, 128 out"


def test_engines_have_room_for_the_largest_of_each() -> None:
    room = limits([Job.parse("32x100+29"), Job.parse("2x2048:64+64")])
    assert room["max_prompts"] == 32 and room["max_len"] == 2176
    assert 32 * 2 * 128 <= room["kv_tokens"] <= 1.2 * 32 * 2 * 128  # whole blocks of 128, and little more


def test_every_engine_gets_the_same_prompts() -> None:
    work = Job.parse("2x5+3").work(3)
    assert prompts(work) == prompts(work)
    assert [len(prompt) for prompt in prompts(work)] == [5, 5]


def test_prompts_share_what_a_job_says_and_nothing_else() -> None:
    """A prefix cache must find nothing of another job, another run, or the same job's other prompts."""
    jobs = [Job.parse(text) for text in ("2x20+3", "3x20+3", "2x20+4", "2x16:4+3")]
    drawn = [prompts(job.work(seed)) for job in jobs for seed in range(2)]
    first, second = drawn[-1]
    assert first[:16] == second[:16] and first[16:] != second[16:]
    heads = [tuple(prompt[:4]) for batch in drawn for prompt in batch]
    assert len(set(heads)) == len(heads) - 2  # the two runs with a shared prefix
