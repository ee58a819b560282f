"""What a request gives when it runs alone, by definition: no scheduler, no blocks."""

import numpy as np

from jaxpaged.core.beam_search import BeamSearch, Hypothesis
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.step import TokenLogprobs
from tests.core.simulated_device import Sampler, candidates, drawn, extend, hidden_state, prompt_record, root_of


class FakeGrammar:
    """Allows a few tokens, which depend on how many came before.

    Args:
      length: tokens after which it is finished.
      fault: what goes wrong at token `at`: "refuses", "raises", "cannot fill", or "" for nothing.
    """

    error = ""

    def __init__(self, vocab_size: int, length: int, fault: str = "", at: int = 0):
        self.vocab_size, self.length, self.fault, self.at = vocab_size, length, fault, at
        self.count = 0

    @property
    def finished(self) -> bool:
        return self.count >= self.length

    @property
    def allowed(self) -> list[int]:
        return sorted({2 + (self.count * 7 + j) % (self.vocab_size - 2) for j in range(5)})

    def accept(self, token_id: int) -> bool:
        assert not self.finished and token_id in self.allowed, "a stale mask"
        self.count += 1
        if self.fault == "raises" and self.count > self.at:
            raise ValueError("a fault of the grammar")
        return self.fault != "refuses" or self.count <= self.at

    def fill(self, mask: list[int]) -> None:
        """As the real one, but the mask is a list of what is allowed."""
        if self.fault == "cannot fill" and self.count >= self.at:
            raise ValueError("no mask")
        mask[:] = self.allowed

    def copy(self) -> "FakeGrammar":
        other = FakeGrammar(self.vocab_size, self.length, self.fault, self.at)
        other.count = self.count
        return other


def solo(request: Request, sample: Sampler, weights: int = 0, grammar: Grammar | None = None) -> tuple[list[int], str]:
    """Output and finish reason of a request that runs alone.

    Args:
      grammar: the request's, in its first state.
    """
    prefix, fake = root_of(request.cache_salt), grammar and grammar.copy()
    for token in request.prompt_token_ids:
        prefix = extend(prefix, token, weights)
    output: list[int] = []
    if request.params.max_tokens == 0:
        return output, "length"
    while True:
        draw, allowed = drawn(prefix, request.index), []
        if fake is not None:
            try:
                fake.fill(allowed)
            except ValueError:
                return output, "error"
        token = allowed[(draw >> 17) % len(allowed)] if allowed else sample(draw)[0]
        ends = token in request.eos_token_ids or token in request.stop_token_ids
        if ends and len(output) + 1 >= request.params.min_tokens:
            return [*output, token], "stop"
        if fake is not None:
            try:
                accepted = fake.accept(token)
            except ValueError:
                accepted = False
            if not accepted:
                return output, "error"
        output.append(token)
        if fake is not None and fake.finished:
            return output, "stop"
        if request.num_prompt_tokens + len(output) >= request.max_total_tokens:
            return output, "length"
        prefix = extend(prefix, token, weights)


def solo_beams(request: Request, vocab_size: int, weights: int = 0) -> list[Hypothesis]:
    """What a beam search finds, alone."""
    most = request.max_total_tokens - request.num_prompt_tokens
    search = BeamSearch(request.params, max_tokens=most, eos_token_ids=request.eos_token_ids)
    prefix = root_of(request.cache_salt)
    for token in request.prompt_token_ids:
        prefix = extend(prefix, token, weights)
    beams = [prefix]
    while not search.finished:
        heard = [candidates(beam, vocab_size, search.num_candidates) for beam in beams]
        beams = [extend(beams[child.parent], child.token, weights) for child in search.advance(heard)]
    return search.results()


def prompt_logprobs(request: Request, weights: int = 0) -> list[TokenLogprobs]:
    """Records of the prompt's positions 1, 2, ..."""
    prefix, records = root_of(request.cache_salt), []
    for position, token in enumerate(request.prompt_token_ids):
        if position:
            records.append(prompt_record(position, token, prefix))
        prefix = extend(prefix, token, weights)
    return records


def solo_vector(request: Request, weights: int = 0) -> bytes:
    """The embedding of a request for one."""
    assert request.pooling is not None
    prefix, states = root_of(request.cache_salt), []
    for token in request.prompt_token_ids:
        prefix = extend(prefix, token, weights)
        states.append(hidden_state(prefix))
    if request.pooling.pooling == "last":
        states = states[-1:]
    return request.pooling.vector(np.sum(states, axis=0, dtype=np.float64), len(states)).tobytes()
