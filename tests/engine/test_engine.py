"""The engine on a tiny model: what ends a request, what is refused, what compiles."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import Step
from jaxpaged.device.buckets import BucketTable
from jaxpaged.device.runner import Runner
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError, RecompilationError, RequestTooLargeError
from tests.engine.tiny import BLOCK, GREEDY, MAX_LEN, VOCAB, prompt, run


def greedy(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12} | options))


# --- what ends a request ---------------------------------------------------------------------------------------


def test_eos_of_any_source_ends_and_is_reported(make_engine, solo):
    tokens = solo(prompt(9)).token_ids
    first = next(i for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    answer = run(make_engine(eos=[VOCAB - 1, tokens[first]]), [prompt(9)])[0]
    assert answer.token_ids == tokens[: first + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_stop_token_ids_end_and_are_named(make_engine, solo):
    tokens = solo(prompt(9)).token_ids
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    answer = run(make_engine(eos=[VOCAB - 1]), [prompt(9)], greedy(stop_token_ids=[stop], ignore_eos=True))[0]
    assert answer.token_ids == tokens[: tokens.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_ignore_eos_ignores_the_whole_list(make_engine, solo):
    """B14."""
    tokens = solo(prompt(9), greedy(max_tokens=20)).token_ids
    answer = run(make_engine(eos=[tokens[0], tokens[4]]), [prompt(9)], greedy(max_tokens=20, ignore_eos=True))[0]
    assert answer.token_ids == tokens
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_min_tokens_bans_eos_and_stop_ids(make_engine, solo, overlap):
    """B13: neither of two EOS ids, nor a stop id, in the first 5 tokens."""
    tokens = solo(prompt(9)).token_ids
    banned = {tokens[0], tokens[1], tokens[2]}
    engine = make_engine(eos=[tokens[0], tokens[1]], overlap=overlap)
    params = greedy(min_tokens=5, max_tokens=40, stop_token_ids=[tokens[2]])
    answer, neighbour = run(engine, [prompt(9), prompt(9)], [params, greedy(ignore_eos=True)])
    assert len(answer.token_ids) >= 5
    assert not banned & set(answer.token_ids[:5])
    assert neighbour.token_ids == tokens


def test_nan_logits_end_only_their_own_request(make_engine, solo):
    engine = make_engine()
    good = solo(prompt(9))
    poisoned = engine.make_request("bad", prompt(20), GREEDY)
    engine.add_request(poisoned)
    engine.add_request(engine.make_request("good", prompt(9), GREEDY))
    while not poisoned.output_token_ids:
        engine.step()
    pages = engine.runner.kv_pages
    engine.runner.kv_pages = pages.at[:, poisoned.block_ids[0]].set(math.nan)
    tokens, ends = [], {}
    engine_updates = []
    while engine.has_work:
        engine_updates += engine.step()
    for update in engine_updates:
        ends[update.request_id] = update
        if update.request_id == "good":
            tokens += update.new_token_ids
    assert ends["bad"].finish_reason == "error" and "NaN" in str(ends["bad"].stop_reason)
    assert ends["good"].finish_reason == "length"
    assert tokens == good.token_ids[-len(tokens) :]
    assert -1 not in poisoned.output_token_ids


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": [3], "min_tokens": 2},
        {"allowed_token_ids": [3], "min_tokens": 2, "use_beam_search": True, "beam_width": 2, "temperature": 0},
    ],
    ids=["banned", "beams"],
)
def test_who_leaves_itself_no_token_fails_alone(asked, make_engine):
    """Nobody's blocks in the prefix cache are lost."""
    engine = make_engine(eos=[3])
    warm = run(engine, [prompt(40)])[0]
    neighbour, nothing = run(engine, [prompt(50), prompt(9)], [GREEDY, SamplingParams(max_tokens=5, **asked)])
    assert nothing.finish_reason == "error" and nothing.token_ids == []
    assert "NaN" not in str(nothing.stop_reason)
    again, other = run(engine, [prompt(40), prompt(50)])
    assert (again.num_cached_tokens, other.num_cached_tokens) == (32, 48)
    assert (again.token_ids, other.token_ids) == (warm.token_ids, neighbour.token_ids)


def test_the_last_abort_frees_host_memory(make_engine):
    engine = make_engine(blocks=8, scheduling={"num_host_blocks": 50})
    for i in range(4):
        engine.add_request(engine.make_request(f"r{i}", prompt(30, i), SamplingParams(temperature=0, max_tokens=60)))
    store = engine.runner._blocks
    while not store.num_swapped_blocks:
        engine.step()
    for i in range(4):
        engine.abort(f"r{i}")
    while engine.has_work:
        engine.step()
    assert store.num_swapped_blocks == 0


# --- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, None])
def test_prompt_that_leaves_one_token(make_engine, max_tokens):
    """B16."""
    answer = run(make_engine(), [prompt(MAX_LEN - 1)], greedy(max_tokens=max_tokens))[0]
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")


@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 10 * MAX_LEN])
def test_prompt_without_room_is_refused_with_both_numbers(make_engine, length):
    """B16, B17."""
    engine = make_engine()
    with pytest.raises(RequestTooLargeError, match=rf"{length}.*{MAX_LEN}"):
        engine.make_request("x", prompt(length), GREEDY)


def test_max_tokens_unset_runs_to_the_context(make_engine):
    answer = run(make_engine(), [prompt(100)], greedy(max_tokens=None))[0]
    assert (len(answer.token_ids), answer.finish_reason) == (MAX_LEN - 100, "length")


def test_prompt_longer_than_a_step_is_chunked(make_engine, solo):
    """B17: a prompt larger than the step's budget, then a short one."""
    engine = make_engine(tokens=16)
    long, short = run(engine, [prompt(100), prompt(5)])
    assert long.token_ids == solo(prompt(100)).token_ids
    assert short.token_ids == solo(prompt(5)).token_ids


def test_request_larger_than_the_pool_is_refused(make_engine, solo):
    """B57, at a smaller size."""
    engine = make_engine(blocks=5)
    with pytest.raises(RequestTooLargeError, match=r"6.*5"):
        engine.add_request(engine.make_request("big", prompt(5 * BLOCK), GREEDY))
    assert run(engine, [prompt(5)])[0].token_ids == solo(prompt(5)).token_ids


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**31, 5279552648203111001, 1.5, True, "a", None])
def test_ids_outside_the_vocabulary_are_named(make_engine, bad):
    """B20."""
    with pytest.raises(InvalidRequestError, match=str(bad)):
        make_engine().make_request("x", [1, bad, 2], GREEDY)


def test_empty_prompt(make_engine):
    with pytest.raises(InvalidRequestError, match="empty"):
        make_engine().make_request("x", [], GREEDY)


def test_numpy_ids_are_fine(make_engine, solo):
    assert run(make_engine(), [np.array(prompt(9))])[0].token_ids == solo(prompt(9)).token_ids


def test_stop_ids_outside_the_vocabulary(make_engine):
    """B22."""
    with pytest.raises(InvalidRequestError, match=str(VOCAB + 100)):
        make_engine().make_request("x", [1], greedy(stop_token_ids=[VOCAB + 100], min_tokens=3))
    with pytest.raises(InvalidRequestError, match="-1"):
        greedy(stop_token_ids=[-1])


def test_more_logprobs_than_the_engine_has(make_engine):
    with pytest.raises(InvalidRequestError, match="logprobs=9 exceeds max_logprobs=8"):
        make_engine().make_request("x", [1], greedy(logprobs=9))


def test_a_refused_request_disturbs_nobody(make_engine, solo):
    engine = make_engine()

    def intrude(engine):
        for bad in ([VOCAB], [], prompt(MAX_LEN)):
            with pytest.raises(InvalidRequestError):
                engine.make_request("bad", bad, GREEDY)

    assert run(engine, [prompt(9)], each_step=intrude)[0] == solo(prompt(9))


# --- log-probabilities -----------------------------------------------------------------------------------------


def test_logprobs(make_engine, solo):
    """B40: 0 gives the sampled token's; k gives the k best besides; None gives none."""
    answers = run(make_engine(), [prompt(9)] * 3, [greedy(logprobs=0), greedy(logprobs=3), greedy()])
    assert [len(a.logprobs) for a in answers] == [12, 12, 0]
    assert all(not entry.top_ids for entry in answers[0].logprobs)
    for entry, token in zip(answers[1].logprobs, answers[1].token_ids, strict=True):
        assert entry.token_id == token == entry.top_ids[0] and entry.rank == 1
        assert entry.logprob == pytest.approx(entry.top_logprobs[0])
        assert len(entry.top_ids) == 3 and sorted(entry.top_logprobs, reverse=True) == entry.top_logprobs
    alone = solo(prompt(9), greedy(logprobs=3))
    for a, b in zip(answers[1].logprobs, alone.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_the_sampled_token_is_listed_even_outside_the_top(make_engine):
    params = SamplingParams(temperature=5.0, seed=1, logprobs=1, max_tokens=20)
    entries = run(make_engine(), [prompt(9)], params)[0].logprobs
    assert any(entry.rank > 1 for entry in entries)
    for entry in entries:
        assert entry.logprob <= entry.top_logprobs[0]
        assert (entry.rank == 1) == (entry.token_id == entry.top_ids[0])


# --- programs --------------------------------------------------------------------------------------------------


def test_nothing_compiles_after_warm_up(make_engine):
    """B66: 200 random requests, all features at random; the shared engine is strict, so a compilation raises."""
    rng = np.random.default_rng(3)
    engine = make_engine(eos=[3], blocks=40)
    requests = []
    for i in range(200):
        params = SamplingParams(
            temperature=float(rng.choice([0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1, 0.9])),
            min_p=float(rng.choice([0, 0.1])),
            min_tokens=int(rng.integers(0, 3)),
            max_tokens=int(rng.integers(3, 12)),
            logprobs=[None, 0, 4][rng.integers(3)],
            seed=[None, 7][rng.integers(2)],
        )
        requests.append(engine.make_request(str(i), prompt(int(rng.integers(1, 100)), i), params))
    finished = 0
    before = engine.num_compilations
    while requests or engine.has_work:
        for _ in range(int(rng.integers(0, 4))):
            if requests:
                engine.add_request(requests.pop())
        finished += sum(update.finish_reason is not None for update in engine.step())
    assert finished == 200
    assert engine.num_compilations == before == 0


def test_strict_raises_on_a_program_that_was_not_warm(tiny_module, tiny_params, tiny_config):
    config = dataclasses.replace(tiny_config, num_kv_blocks=8, max_num_seqs=1, max_num_batched_tokens=4)
    runner = Runner(tiny_module, tiny_params, config, vocab_size=256, buckets=BucketTable([1], [4], max_num_seqs=1))
    step = Step(requests=[None], slots=[0], starts=[0], num_tokens=[1], samples=[True], total_tokens=1)
    with pytest.raises(RecompilationError, match="2 programs"):  # forward and sample
        runner.launch(step)


def test_debug_kernels_name_a_page_that_is_not_there(tiny_module, tiny_params, tiny_config):
    """Here the scheduler believes in more blocks than the pool has: 4 and scratch."""
    config = dataclasses.replace(
        tiny_config, num_kv_blocks=4, max_num_seqs=1, max_num_batched_tokens=16, debug_kernels=True, strict=False
    )
    runner = Runner(tiny_module, tiny_params, config, vocab_size=256, buckets=BucketTable([1], [16], max_num_seqs=1))
    manager = BlockManager(20, BLOCK, enable_prefix_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=128)
    engine = Engine(scheduler, runner, config, vocab_size=256, eos_token_ids=())
    assert run(engine, [prompt(20)])[0].finish_reason == "length"
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"must be in \[0, (5|80)\), got"):
        run(engine, [prompt(100)])
    assert not engine.has_work


def test_the_step_copies_neither_pool_nor_params(runner):
    pool = math.prod(runner.kv_pages.shape) * runner.kv_pages.dtype.itemsize
    shape = "f32[" + ",".join(map(str, runner.kv_pages.shape)) + "]"
    for bucket, program in runner.programs.items():
        text = program.as_text()
        shapes = {shape} | {f"f32[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(runner.params) if x.ndim > 1}
        copies = [
            line for line in text.splitlines() if " copy(" in line and any(s in line.split(" copy(")[0] for s in shapes)
        ]
        assert not copies, (bucket, copies)
        analysis = program.memory_analysis()
        assert analysis.alias_size_in_bytes >= pool, "the pool is not donated"
        assert analysis.temp_size_in_bytes < pool / 2, bucket


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_no_half_written_blocks(make_engine, solo, monkeypatch, error):
    """Blocks become findable when they are scheduled; if the launch then fails, nobody may find them."""
    engine = make_engine(tokens=32)
    engine.add_request(engine.make_request("a", prompt(60), GREEDY))
    real, calls = engine.runner.launch, 0

    def failing(step):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("injected")
        return real(step)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", failing)
        with pytest.raises(error):
            while engine.has_work:
                engine.step()
    assert not engine.has_work
    engine.scheduler.check_invariants()
    assert run(engine, [prompt(60)])[0].token_ids == solo(prompt(60)).token_ids


# --- aborts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 6])
def test_abort_at_any_moment_frees_blocks_and_disturbs_nobody(make_engine, solo, overlap, after):
    """B51: while waiting, in the middle of a chunked prompt, while decoding."""
    engine = make_engine(tokens=16, overlap=overlap)
    engine.add_request(engine.make_request("gone", prompt(50), GREEDY))
    steps = 0

    def leave(engine):
        nonlocal steps
        if steps == after:
            (update,) = engine.abort("gone")
            assert update.finish_reason == "abort"
            assert engine.abort("gone") == []
        steps += 1

    answers = {}
    engine.add_request(engine.make_request("stays", prompt(9), GREEDY))
    while engine.has_work:
        if "gone" in engine.scheduler._requests:
            leave(engine)
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.new_token_ids)
        engine.scheduler.check_invariants()
    assert answers["stays"] == solo(prompt(9)).token_ids
    manager = engine.scheduler.block_manager
    assert manager.num_used_blocks == 0


def test_an_id_can_be_used_again_right_after_an_abort(make_engine, solo):
    """B50, at this level: the late result of the old request must not reach the new one."""
    engine = make_engine()
    engine.add_request(engine.make_request("a", prompt(50), GREEDY))
    engine.step(), engine.step(), engine.step()
    with pytest.raises(InvalidRequestError, match="'a'"):
        engine.add_request(engine.make_request("a", prompt(9), GREEDY))
    engine.abort("a")
    engine.add_request(engine.make_request("a", prompt(9), GREEDY))
    tokens = []
    while engine.has_work:
        for update in engine.step():
            tokens += update.new_token_ids
    assert tokens == solo(prompt(9)).token_ids


def test_200_random_disconnects(make_engine):
    rng = np.random.default_rng(5)
    engine = make_engine(blocks=20, tokens=32)
    live, started = [], 0
    while started < 200 or engine.has_work:
        if started < 200 and rng.random() < 0.7:
            name = f"q{started}"
            engine.add_request(engine.make_request(name, prompt(int(rng.integers(1, 90)), started), GREEDY))
            live.append(name)
            started += 1
        if live and rng.random() < 0.6:
            engine.abort(live.pop(int(rng.integers(len(live)))))
        for update in engine.step():
            if update.finish_reason and update.request_id in live:
                live.remove(update.request_id)
        engine.scheduler.check_invariants()
    assert engine.scheduler.block_manager.num_used_blocks == 0
