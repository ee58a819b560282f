"""What sampling options mean on the engine: against an oracle without cache or batch, and under preemption."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.sampling_params import SamplingParams
from tests.engine.tiny import BLOCK, MAX_LEN, VOCAB, prompt, run
from tests.engine.workloads import EOS, Job, TableGrammar, complaints, play
from tests.models.paged import QUICK_COMPILE, dense_logits


@pytest.fixture(scope="module")
def next_logits(tiny_module, tiny_params):
    """Raw logits after some tokens, computed without a cache."""
    dense = jax.jit(partial(dense_logits, tiny_module), compiler_options=QUICK_COMPILE)

    def logits(token_ids) -> np.ndarray:
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.array(dense(tiny_params, jnp.asarray(padded))[len(token_ids) - 1], np.float64)

    return logits


def greedy_by_hand(next_logits, job: Job) -> list[int]:
    """The tokens by the definitions of the options, in the order in which they apply."""
    params, given = job.params, list(job.prompt)
    grammar = TableGrammar(*job.grammar) if job.grammar else None
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = next_logits(given + output)
        banned = set()
        if params.allowed_token_ids is not None:
            banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
        if grammar:
            mask = np.zeros(VOCAB // 32, np.int32)
            grammar.fill(mask)
            banned |= set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little") == 0))
        for word in job.bad_word_ids:
            if (
                list(word[:-1]) == output[len(output) - len(word) + 1 :][: len(word) - 1]
                and len(word) <= len(output) + 1
            ):
                banned.add(word[-1])
        if len(output) < params.min_tokens:
            banned |= {*EOS, *(params.stop_token_ids or ())}
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        for token in set(given + output):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        logits[sorted(banned)] = -np.inf
        output.append(int(np.argmax(logits)))
        if output[-1] in EOS or output[-1] in (params.stop_token_ids or ()):
            break
        if grammar:
            assert grammar.accept(output[-1])
            if grammar.finished:
                break
    return output


def greedy(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24} | options))


CASES = {
    "plain": Job("x", tuple(prompt(9)), greedy()),
    "repetition": Job("x", tuple(prompt(30)), greedy(repetition_penalty=1.8)),
    "presence": Job("x", tuple(prompt(30)), greedy(presence_penalty=2.0)),
    "frequency": Job("x", tuple(prompt(9)), greedy(frequency_penalty=2.0)),
    "all penalties": Job("x", (7, 7), greedy(repetition_penalty=1.3, presence_penalty=-1.5, frequency_penalty=0.7)),
    "bias": Job("x", tuple(prompt(12)), greedy(logit_bias={5: 30.0, 9: -100.0, 200: 25.0}, frequency_penalty=2.0)),
    "allowed": Job("x", tuple(prompt(12)), greedy(allowed_token_ids=list(range(10, 60)), repetition_penalty=3.0)),
    "min tokens": Job("x", tuple(prompt(9)), greedy(stop_token_ids=list(range(64)), min_tokens=5)),
    "grammar": Job("x", tuple(prompt(9)), greedy(repetition_penalty=1.5), grammar=(1, 12)),
}


@pytest.mark.parametrize("name", CASES)
def test_options_mean_what_they_say(make_engine, next_logits, name):
    """B33 and others, from the first token on: a repetition penalty sees the prompt already then."""
    job = CASES[name]
    answers = play(make_engine(eos=EOS, poison=True), (job,))
    assert answers["x", 0].token_ids == greedy_by_hand(next_logits, job)


def test_bad_words_are_banned_one_token_and_many(make_engine, solo, next_logits):
    plain = solo(prompt(9)).token_ids
    words = ((plain[0],), (plain[2], plain[3]), tuple(plain[4:7]))
    job = Job("x", tuple(prompt(9)), greedy(), bad_word_ids=words)
    tokens = play(make_engine(eos=EOS), (job,))["x", 0].token_ids
    assert tokens == greedy_by_hand(next_logits, job) != plain
    for word in words:
        assert not any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 100], ids=["recompute", "swap"])
def test_options_survive_preemption(make_engine, solo_job, overlap, host_blocks):
    """B34: what was output stays output although it is computed again as if it were prompt."""
    options = {"presence_penalty": 2.0, "repetition_penalty": 1.2, "min_tokens": 20, "stop_token_ids": [*range(64)]}
    jobs = tuple(Job(f"r{i}", tuple(prompt(30, i)), greedy(max_tokens=40, **options)) for i in range(6))
    engine = make_engine(
        blocks=10, tokens=24, overlap=overlap, eos=EOS, poison=True, scheduling={"num_host_blocks": host_blocks}
    )
    answers = play(engine, jobs)
    assert engine.scheduler.num_preemptions >= 2, "the pool is too large to test anything"
    for job in jobs:
        assert not complaints(job, answers, solo_job(job))
        assert len(answers[job.name, 0].token_ids) > 20


# --- samples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("blocks", [64, 6], ids=["ample", "tight"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 40])
def test_samples_of_one_prompt(make_engine, solo_job, overlap, blocks, length):
    """B35: each index once, with one end; sample 0 is what one sample alone would be, the others differ."""
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=20, logprobs=2)
    job = Job("x", tuple(prompt(length)), params)
    engine = make_engine(blocks=blocks, overlap=overlap, eos=EOS, poison=True)
    neighbour = Job("y", tuple(prompt(10)), greedy())
    answers = play(engine, (neighbour, job))
    assert {index for name, index in answers if name == "x"} == {0, 1, 2}
    assert not complaints(job, answers, solo_job(job))
    assert len({tuple(answers["x", i].token_ids) for i in range(3)}) == 3
    one = Job("x", job.prompt, SamplingParams(temperature=1.0, seed=11, max_tokens=20, logprobs=2))
    assert solo_job(one)["x", 0].token_ids == answers["x", 0].token_ids


def test_samples_share_the_prompt(make_engine):
    """Four samples of a prompt of 100 tokens fit a pool for not much more than one."""
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8)
    engine = make_engine(blocks=14, caching=False, eos=EOS, poison=True)
    engine.add_request(Job("x", tuple(prompt(100)), params).request(engine))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.num_running)
        engine.scheduler.check_invariants()
    assert most == 4 and not engine.scheduler.num_preemptions


# --- log-probabilities of the prompt --------------------------------------------------------------------------------


def check_prompt_logprobs(next_logits, token_ids, records, k):
    assert len(records) == len(token_ids) - 1
    for position, record in enumerate(records, 1):
        logits = next_logits(token_ids[:position])
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert record.token_id == token_ids[position] and len(record.top_ids) == k
        assert record.logprob == pytest.approx(logprobs[token_ids[position]], abs=1e-4)
        assert record.rank == (logprobs > logprobs[token_ids[position]]).sum() + 1
        np.testing.assert_allclose(record.top_logprobs, np.sort(logprobs)[::-1][:k], atol=1e-4)


def test_prompt_logprobs_and_the_prefix_cache(make_engine, next_logits):
    """B38: sent twice, then a prompt that shares one block."""
    engine = make_engine()
    whole = prompt(2 * BLOCK + 1)
    for token_ids in (whole, whole, whole[:BLOCK] + prompt(12)):
        answer = run(engine, [token_ids], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))[0]
        check_prompt_logprobs(next_logits, token_ids, answer.prompt_logprobs, 1)
    assert run(engine, [whole])[0].num_cached_tokens == 2 * BLOCK


@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_logprobs_in_chunks(make_engine, next_logits, overlap):
    """B39: at the chunks' edges too, and beside a neighbour; nothing ends early."""
    engine = make_engine(tokens=16, overlap=overlap, poison=True)
    token_ids = prompt(50)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    answer, neighbour = run(engine, [token_ids, prompt(40)], [params, greedy()])
    check_prompt_logprobs(next_logits, token_ids, answer.prompt_logprobs, 2)
    assert len(answer.token_ids) == 4 and not neighbour.prompt_logprobs


def test_a_prompt_is_scored_without_generating(make_engine, next_logits):
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    for length in (1, 2, 40):
        answer = run(make_engine(tokens=16), [prompt(length)], params)[0]
        assert answer.token_ids == [] and answer.finish_reason == "length"
        check_prompt_logprobs(next_logits, prompt(length), answer.prompt_logprobs, 0)
