"""Steps launched by hand: what they yield, when they sample, and that nothing compiles."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.core.step import Swap
from jaxpaged.device.compilation import compilations
from tests.device.by_hand import BLOCK, MAX_LEN, VOCAB, dense_logprobs, make_request, make_step, prompt

PER_ROW = MAX_LEN // BLOCK


def words(*token_ids: int) -> np.ndarray:
    """A mask that allows these tokens only."""
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_masked_steps_sample_when_the_masks_are_there(runner):
    """The second of two rows has a grammar; its neighbour takes the most likely token."""
    plain, masked = make_request(runner, prompt(9)), make_request(runner, prompt(12), grammar=object())
    launched = runner.launch(make_step([(plain, 0, 9), (masked, 0, 12)], masked=[1]))
    assert launched.tokens is None and launched.forwarded is not None
    with pytest.raises(AssertionError, match="not sampled"):
        runner.collect(launched)
    runner.sample(launched, words(17, 130)[None])
    best = [int(dense_logprobs(runner, r.all_token_ids)[-1].argmax()) for r in (plain, masked)]
    by_mask = max((17, 130), key=lambda token: dense_logprobs(runner, masked.all_token_ids)[-1, token])
    assert runner.collect(launched).token_ids == [[best[0]], [by_mask]] and by_mask != best[1]
    assert launched.forwarded is None, "logits are not held longer than needed"


def test_masks_belong_to_rows_that_sample(runner):
    """A row before it is in the middle of its prompt: masks are numbered by row, logits by sampling row."""
    long, masked = make_request(runner, prompt(30)), make_request(runner, prompt(12), grammar=object())
    launched = runner.launch(make_step([(long, 0, 20), (masked, 0, 12)], masked=[1]))
    runner.sample(launched, words(99)[None])
    assert runner.collect(launched).token_ids == [[], [99]]


def test_masks_of_all_rows_are_taken_as_they_are(runner):
    requests = [make_request(runner, prompt(n), grammar=object()) for n in (9, 12)]
    launched = runner.launch(make_step([(r, 0, r.num_tokens) for r in requests], masked=[0, 1]))
    masks = np.stack([words(99), words(7)])
    assert masks.shape == (len(launched.forwarded.logits), runner.num_mask_words)
    runner.sample(launched, masks)
    assert runner.collect(launched).token_ids == [[99], [7]]


def test_a_sampled_token_is_the_next_input(runner):
    request = make_request(runner, prompt(9))
    first = runner.launch(make_step([(request, 0, 9)]))
    step = make_step([(request, 9, 1)], admit=False)
    step.samples = [True]
    second = runner.launch(step)  # before anyone has seen the first token
    tokens = runner.collect(first).token_ids[0] + runner.collect(second).token_ids[0]
    assert tokens[0] == dense_logprobs(runner, prompt(9))[-1].argmax()
    assert tokens[1] == dense_logprobs(runner, [*prompt(9), tokens[0]])[-1].argmax()


def test_steps_without_features_take_the_plain_program(runner, monkeypatch):
    """Also beside what an idle slot's last request used; and both programs agree."""
    greedy, random, other = (make_request(runner, prompt(9), temperature=t) for t in (0, 0.5, 0))
    both = make_step([(greedy, 0, 9), (random, 0, 9)])
    whole = runner.launch(both)
    assert whole.sampled is not None
    monkeypatch.setattr(runner.samplers, "full_program", None)
    step = make_step([(other, 0, 9)])  # the random one is gone, its slot not yet taken
    launched = runner.launch(step)
    assert runner.collect(launched).token_ids[0] == runner.collect(whole).token_ids[0]


def test_options_are_uploaded_with_the_request(runner):
    """And do not stay for the next one in the slot."""
    biased = make_request(runner, prompt(9), logit_bias={77: 100.0}, temperature=0)
    assert biased.device_options is not None
    plain = make_request(runner, prompt(9))
    assert plain.device_options is None
    tokens = [runner.collect(runner.launch(make_step([(r, 0, 9)]))).token_ids[0][0] for r in (biased, plain)]
    assert tokens == [77, dense_logprobs(runner, prompt(9))[-1].argmax()] and tokens[1] != 77


@pytest.mark.parametrize("k", [0, 4, -1])
def test_log_probabilities_as_many_as_asked_for(runner, k):
    result = runner.collect(runner.launch(make_step([(make_request(runner, prompt(9), logprobs=k), 0, 9)])))
    (record,), row = result.logprobs[0], dense_logprobs(runner, prompt(9))[-1]
    assert len(record.top_ids) == (VOCAB if k < 0 else k) and record.top_ranks is None
    assert (record.token_id, record.rank) == (row.argmax(), 1)
    np.testing.assert_allclose(record.top_logprobs, np.sort(row)[::-1][: len(record.top_ids)], atol=1e-3)


def test_log_probabilities_of_given_tokens(runner):
    """B40: ids in the order of the request, with their ranks; another row gets the most likely ones."""
    ids = [200, 3, 111]
    given = make_request(runner, prompt(9), logprobs=1, logprob_token_ids=ids)
    usual = make_request(runner, prompt(9), logprobs=2)
    result = runner.collect(runner.launch(make_step([(given, 0, 9), (usual, 0, 9)])))
    row = dense_logprobs(runner, prompt(9))[-1]
    (record,), (other,) = result.logprobs
    assert record.top_ids == ids and record.top_ranks == [1 + int(np.sum(row > row[i])) for i in ids]
    np.testing.assert_allclose(record.top_logprobs, row[ids], atol=1e-3)
    assert len(other.top_ids) == 2 and other.top_ranks is None


def test_swapped_and_copied_blocks_hold_the_same_context(runner):
    """A prompt is computed, leaves for host memory, returns to other blocks, is copied, and goes on from the copy."""
    ids = prompt(2 * BLOCK + 3)
    request = make_request(runner, ids)
    runner.collect(runner.launch(make_step([(request, 0, 2 * BLOCK)])))
    other = make_request(runner, prompt(40, seed=2))
    wiped = make_step([(other, 0, 40)], swap_out=[Swap(1, [1, 2])])  # another takes its slot and blocks
    runner.collect(runner.launch(wiped))
    a, b, c, d = range(2 * PER_ROW + 1, 2 * PER_ROW + 5)
    step = make_step([(request, 2 * BLOCK, 3)], swap_in=[Swap(1, [a, b])], copies=[(a, c), (b, d)])
    step.admissions[0].block_ids = [c, d, d + 1]
    assert runner.collect(runner.launch(step)).token_ids == [[dense_logprobs(runner, ids)[-1].argmax()]]


def test_idle_time_changes_nothing(runner):
    """What runs on padding meanwhile leaves pages and slots as they are, and compiles nothing."""
    ids, programs = prompt(2 * BLOCK + 3), runner.num_programs
    request = make_request(runner, ids)
    runner.collect(runner.launch(make_step([(request, 0, 2 * BLOCK)])))
    before, rounds = compilations.count, 1
    runner._warm_up.unused.update(runner.buckets.all)  # other tests have run some
    while runner.use_idle_time():
        rounds += 1
    assert rounds == len(runner.buckets.all) and not runner.use_idle_time()
    assert (runner.num_programs, compilations.count) == (programs, before)
    runner._warm_up.unused.update(runner.buckets.all)
    step = make_step([(request, 2 * BLOCK, 3)], admit=False)
    launched = runner.launch(step)
    assert len(runner._warm_up.unused) == len(runner.buckets.all) - 1, "what a request has run has run"
    assert runner.collect(launched).token_ids == [[dense_logprobs(runner, ids)[-1].argmax()]]


def test_what_the_host_memory_holds(runner):
    assert runner.num_host_blocks == 10


def test_nothing_compiled_after_warm_up(runner):
    """Strict mode would have raised; warm-up made no program that it does not count."""
    assert runner.recompilations == 0
    assert runner.num_programs == 2 + 2 + 2 + 5 + 2 + 1, "forward, sample, admissions, blocks, prompts, vectors"
    assert not any(runner.cold_programs.values())
    tokens = sorted(bucket.tokens for bucket in runner.buckets.all)
    warm = runner.warm_programs
    assert sorted(warm["decoding, by requests"] + warm["forward, by tokens"]) == tokens
    assert warm["sampling, by rows"] == runner.buckets.sample_rows
    assert warm["pooling, by tokens"] == warm["prompt logprobs, by tokens"] == runner.buckets.hidden_rows
