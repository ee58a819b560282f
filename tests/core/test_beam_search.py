"""Against transformers' own answers, against brute force, and rule by rule."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.beam_search import BeamSearch, Child
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import TokenLogprobs
from tests.core.beam_cases import Case, Toy, draw_cases, read_goldens

CASES = draw_cases()


def row(*candidates):
    """A record as the device gives it: (token, logprob) pairs, best first."""
    ids, logprobs = [list(column) for column in zip(*candidates, strict=True)]
    return TokenLogprobs(ids[0], logprobs[0], 1, ids, logprobs)


def best_of(logprobs, count):
    order = np.argsort(-logprobs, kind="stable")[:count]
    return row(*((int(token), float(logprobs[token])) for token in order))


def make(*, eos=(), max_tokens=8, width=2, **options):
    params = SamplingParams(use_beam_search=True, beam_width=width, max_tokens=max_tokens, **options)
    return BeamSearch(params, max_tokens=max_tokens, eos_token_ids=eos)


def search(case: Case, **options) -> BeamSearch:
    """Runs a search in a toy model, with as few candidates as it says that it needs."""
    beams = make(
        eos=case.toy.ending,
        width=case.beams,
        n=case.n,
        max_tokens=case.max_tokens,
        min_tokens=case.min_tokens,
        early_stopping=case.early_stopping,
        length_penalty=case.length_penalty,
        **options,
    )
    table = case.toy.logprobs()
    sequences = [[0]]
    for step in itertools.count(1):
        rows = [table[step - 1, tokens[-1]].copy() for tokens in sequences]
        if step <= case.min_tokens:
            for logprobs in rows:
                logprobs[list(case.toy.ending)] = -math.inf  # as the device does
        children = beams.advance([best_of(logprobs, beams.num_candidates) for logprobs in rows])
        if beams.finished:
            assert not children and not beams.live
            return beams
        assert 1 <= len(children) <= case.beams and beams.live == [child.logprob for child in children]
        sequences = [[*sequences[child.parent], child.token] for child in children]
    raise AssertionError("unreachable")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_finds_what_transformers_finds(number):
    expected = read_goldens()[number]
    found = search(CASES[number]).results()
    assert [h.token_ids for h in found] == [ids for ids, _ in expected]
    np.testing.assert_allclose([h.score for h in found], [score for _, score in expected], rtol=1e-4, atol=1e-5)


def test_the_goldens_are_what_transformers_says_today():
    pytest.importorskip("torch", reason="compares with transformers' beam search, which needs torch")
    from tests.core.make_beam_goldens import search as search_by_transformers

    for case, expected in zip(CASES, read_goldens(), strict=True):
        found = search_by_transformers(case)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], rtol=1e-4)


def every_sequence(toy: Toy, max_tokens: int, min_tokens: int):
    """All sequences that may be returned, with their log-probabilities."""
    table = toy.logprobs()

    def grow(tokens, logprob):
        for token in range(toy.vocab):
            ends = token in toy.ending
            if ends and len(tokens) < min_tokens:
                continue
            longer = [*tokens, token]
            total = logprob + table[len(tokens), tokens[-1] if tokens else 0, token]
            if ends or len(longer) == max_tokens:
                yield longer, total
            else:
                yield from grow(longer, total)

    return list(grow([], 0.0))


@given(
    st.builds(Toy, seed=st.integers(0, 1000), vocab=st.just(3), ending=st.sampled_from([(), (1,), (0, 2)])),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
)
def test_a_search_as_wide_as_the_space_is_exhaustive(toy, max_tokens, min_tokens, length_penalty):
    min_tokens = min(min_tokens, max_tokens)
    case = Case(toy, 40, 40, max_tokens, min_tokens, "never", length_penalty)
    expected = every_sequence(toy, max_tokens, min_tokens)
    found = search(case).results()
    assert len(found) == len(expected)
    scores = {tuple(ids): logprob / len(ids) ** length_penalty for ids, logprob in expected}
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert scores.keys() == {tuple(h.token_ids) for h in found}
    np.testing.assert_allclose([h.score for h in found], [scores[tuple(h.token_ids)] for h in found])


@pytest.mark.parametrize("number", range(30))
def test_results_are_true_sequences_of_the_model(number):
    """Whatever was pruned: each result's log-probability is that of its tokens, and its records add up to it."""
    case = CASES[number]
    table = case.toy.logprobs()
    for h in search(case, logprobs=2).results():
        fed = [0, *h.token_ids]
        each = [table[i, fed[i], token] for i, token in enumerate(h.token_ids)]
        assert h.logprob == pytest.approx(sum(each))
        assert [record.logprob for record in h.logprobs] == pytest.approx(each)
        for record, token in zip(h.logprobs, h.token_ids, strict=True):
            assert record.token_id == token and len(record.top_ids) == 2
            assert record.rank > 2 or record.top_ids[record.rank - 1] == token
        assert not any(token in case.toy.ending for token in h.token_ids[:-1])
        stopped = h.token_ids[-1] in case.toy.ending
        assert h.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(h.token_ids) == case.max_tokens


@pytest.mark.parametrize(("logprobs", "count"), [(None, 5), (0, 5), (4, 5), (6, 6), (-1, -1)])
def test_candidates_are_as_many_as_searching_and_telling_need(logprobs, count):
    assert make(eos=[9, 8], stop_token_ids=[9, 5], logprobs=logprobs).num_candidates == count


def test_the_best_that_do_not_end_live_on():
    beams = make(eos=[9])
    assert beams.live == [0.0] and beams.num_candidates == 3
    assert beams.advance([row((9, -0.1), (4, -2.5), (7, -3.0))]) == [Child(0, 4, -2.5), Child(0, 7, -3.0)]
    first = [row((1, -1.0), (2, -4.0), (3, -9.0)), row((1, -0.2), (2, -0.25), (3, -9.0))]
    assert beams.advance(first) == [Child(1, 1, -3.2), Child(1, 2, -3.25)]
    assert not beams.finished and beams.length == 2


def test_what_ends_below_the_width_is_dropped():
    """Two continuations are better than the one that ends: it is no hypothesis."""
    beams = make(eos=[9])
    beams.advance([row((1, -1.0), (2, -1.5), (9, -1.6))])
    assert [h.finish_reason for h in beams.results()] == [None]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "finished"),
    [
        (True, 1.0, True),  # two have ended
        (False, 1.0, True),  # the live ones' -3.0 / 2 is worse than -0.3 / 1
        ("never", 1.0, False),  # but -3.0 / 8 is better than -0.8 / 2
        ("never", 0.0, True),  # a log-probability only falls
        ("never", -1.0, True),
        (False, 0.0, True),
    ],
)
def test_when_it_is_over(early_stopping, length_penalty, finished):
    beams = make(eos=[9], n=2, early_stopping=early_stopping, length_penalty=length_penalty)
    beams.advance([row((9, -0.3), (1, -0.5), (2, -2.0))])
    assert not beams.finished
    children = beams.advance([row((9, -0.3), (1, -2.5), (2, -2.6)), row((9, -1.4), (1, -1.5), (2, -1.6))])
    assert beams.finished == finished and bool(children) != finished
    assert [h.token_ids for h in beams.results()] == [[9], [1, 9]]


def test_reasons():
    beams = make(eos=[9], stop_token_ids=[5], max_tokens=2, width=3, n=3)
    beams.advance([row((9, -0.5), (5, -1.0), (1, -1.5), (2, -3.0), (3, -3.0))])
    beams.advance([row((1, -0.1), (9, -5.0)), row((9, -0.2), (1, -5.0)), row((1, -7.0), (2, -7.5))])
    assert beams.finished
    reasons = {tuple(h.token_ids): (h.finish_reason, h.stop_reason) for h in beams.results()}
    assert reasons == {(9,): ("stop", None), (5,): ("stop", 5), (1, 1): ("length", None)}


def test_ignored_eos_is_a_token_like_others():
    beams = make(eos=[9], ignore_eos=True, max_tokens=2)
    assert beams.num_candidates == 2
    assert beams.advance([row((9, -0.1), (1, -2.0))]) == [Child(0, 9, -0.1), Child(0, 1, -2.0)]


def test_nothing_ends_before_min_tokens():
    """Even if the device offers it."""
    beams = make(eos=[9], stop_token_ids=[8], min_tokens=1)
    assert beams.advance([row((9, -0.1), (8, -0.2), (1, -2.0), (2, -3.0))]) == [Child(0, 1, -2.0), Child(0, 2, -3.0)]
    beams.advance([row((9, -0.1), (3, -1.0)), row((3, -0.1), (4, -1.0))])
    assert beams.results()[0].token_ids == [1, 9]


def test_what_has_no_probability_is_never_taken():
    beams = make(width=3, n=3, max_tokens=2)
    assert beams.advance([row((4, -0.1), (1, -math.inf), (2, -math.inf))]) == [Child(0, 4, -0.1)]
    assert beams.advance([row((4, 0.0), (1, -math.inf), (2, -math.inf))]) == []
    assert [h.token_ids for h in beams.results()] == [[4, 4]]  # no more exist


def test_a_dead_end_ends_the_search():
    beams = make()
    assert beams.advance([row((4, -math.inf))]) == []
    assert beams.finished and beams.results() == []


def test_equals_are_ranked_by_beam_and_then_by_token():
    beams = make(width=3)
    assert [c.token for c in beams.advance([row((7, -1.0), (3, -1.0), (5, -1.0))])] == [3, 5, 7]
    children = beams.advance([row((2, -1.0), (1, -1.0)), row((1, -1.0), (0, -1.0)), row((0, -0.5), (9, -1.0))])
    assert [(c.parent, c.token) for c in children] == [(2, 0), (0, 1), (0, 2)]


def test_cut_short_it_gives_the_best_of_both():
    beams = make(eos=[9], n=2)
    assert beams.results() == []
    beams.advance([row((1, -0.1), (9, -0.5), (2, -0.6))])
    assert [(h.token_ids, h.finish_reason) for h in beams.results()] == [([9], "stop"), ([1], None)]


def test_it_is_deterministic():
    for case in CASES[:10]:
        assert search(case).results() == search(case).results()


def test_logprobs_are_of_the_path_that_was_taken():
    """The winner continues the beam that was second."""
    beams = make(max_tokens=2, logprobs=1)
    beams.advance([row((1, -0.5), (2, -1.0), (3, -3.0))])
    beams.advance([row((4, -2.0), (5, -2.5)), row((4, -0.2), (6, -0.1))])
    (best,) = beams.results()
    assert best.token_ids == [2, 6] and best.logprob == pytest.approx(-1.1)
    assert best.logprobs == [TokenLogprobs(2, -1.0, 2, [1], [-0.5]), TokenLogprobs(6, -0.1, 2, [4], [-0.2])]
