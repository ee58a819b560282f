"""B51: readers leave AsyncLLM at any moment; every block comes back, the host's too, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from jaxpaged.core.request import Status
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from tests import tiny_tokenizers
from tests.engine.tiny import prompt
from tests.waiting import until

TOKENIZER = tiny_tokenizers.byte_level()


@pytest.fixture
def engine(make_engine):
    """Small enough that requests are preempted and swapped; its books are checked after every step."""
    engine = make_engine(blocks=14, tokens=32, seqs=6, scheduling={"num_host_blocks": 8})
    real = engine.step

    def step():
        updates = real()
        engine.scheduler.check_invariants()
        return updates

    engine.step = step
    return engine


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 40} | options))


async def collect(llm: AsyncLLM, token_ids: list[int], wanted: SamplingParams, tokens=None) -> list[list[int]]:
    """Tokens of each sample. `tokens`: where they are put as they come."""
    tokens = [[] for _ in range(wanted.n)] if tokens is None else tokens
    async for output in llm.generate(token_ids, wanted):
        for completion in output.outputs:
            if wanted.output_kind == "delta":
                tokens[completion.index] += completion.token_ids
            else:
                tokens[completion.index] = completion.token_ids
    return tokens


async def settled(llm: AsyncLLM, engine) -> None:
    """Waits until nobody holds anything, and lets one more request carry the last news to the device."""
    await until(lambda: not engine.has_work and llm.num_unfinished == 0)
    await collect(llm, prompt(3), params(max_tokens=2))
    await until(lambda: not engine.has_work)
    assert engine.stats.num_used_blocks == engine.scheduler._residency.host_pool.num_used_blocks == 0
    assert engine.runner._blocks.num_swapped_blocks == 0
    assert engine.num_compilations == 0


def play(engine, test) -> None:
    async def main() -> None:
        llm = AsyncLLM(InProcessClient(engine, TOKENIZER), TOKENIZER)
        try:
            await asyncio.wait_for(test(llm), 300)
            assert llm.is_healthy
        finally:
            await llm.shutdown(timeout=0)

    asyncio.run(main())


def live(engine) -> list:
    return [sample for samples in engine.scheduler.roster.samples.values() for sample in samples]


def is_waiting(engine) -> bool:
    return any(r.status is Status.WAITING and not r.num_computed_tokens for r in live(engine))


def is_in_its_second_chunk(engine) -> bool:
    return any(32 <= r.num_computed_tokens < r.num_prompt_tokens for r in live(engine))


def decodes(engine) -> bool:
    return any(r.num_output_tokens > 3 for r in live(engine))


def is_preempted(engine) -> bool:
    return any(r.status is Status.WAITING and r.num_preemptions for r in live(engine))


def is_swapped(engine) -> bool:
    return any(r.host_key is not None for r in live(engine))


@pytest.mark.parametrize("moment", [is_waiting, is_in_its_second_chunk, decodes, is_preempted, is_swapped])
@pytest.mark.parametrize(
    "options",
    [{}, {"n": 3, "temperature": 1, "seed": 1}, {"n": 2, "beam_width": 3, "use_beam_search": True}],
    ids=["n=1", "n=3", "beams"],
)
@pytest.mark.parametrize("kind", ["delta", "final"])
def test_all_leave_at_one_moment(engine, moment, options, kind) -> None:
    """(i) to (iv), (vi), (vii): waiting, in chunk 2 of the prompt, decoding, preempted, swapped; streamed or not."""

    async def test(llm: AsyncLLM) -> None:
        wanted = params(**options, output_kind=kind, max_tokens=None)
        tasks = [asyncio.ensure_future(collect(llm, prompt(70, i), wanted)) for i in range(8)]
        await until(lambda: moment(engine))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(llm, engine)

    play(engine, test)


def test_leaving_after_the_end_is_no_abort(engine) -> None:
    """(v)."""

    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate(prompt(9), params(max_tokens=3))
        outputs = [output async for output in stream]
        await stream.aclose()
        assert outputs[-1].finish_reason == "length"
        await settled(llm, engine)

    play(engine, test)


def test_200_random_disconnects_disturb_nobody(engine, solo) -> None:
    rng = random.Random(6)
    together = range(6)  # they come at once and stay: the pool holds their prompts, and not their answers
    stays = {i: prompt(20 + i // 4, i) for i in (*together, *range(20, 200, 20))}
    expected = {i: solo(token_ids, params()).token_ids for i, token_ids in stays.items()}

    async def test(llm: AsyncLLM) -> None:
        async def visitor(i: int) -> None:
            if i in stays:
                assert (await collect(llm, stays[i], params()))[0] == expected[i]
                return
            kind = rng.choice(["delta", "cumulative", "final"])
            n = rng.choice([1, 1, 3])
            wanted = params(output_kind=kind, n=n, seed=i, temperature=1, max_tokens=rng.choice([5, 40, None]))
            with_prompt = prompt(rng.randrange(1, 100), i)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(collect(llm, with_prompt, wanted), rng.random() * 0.2)

        visitors = []
        for i in range(200):
            visitors.append(asyncio.ensure_future(visitor(i)))
            if i not in together:
                await asyncio.sleep(rng.random() * 0.02)
        await asyncio.gather(*visitors)
        await settled(llm, engine)
        assert engine.stats.num_preemptions

    play(engine, test)
