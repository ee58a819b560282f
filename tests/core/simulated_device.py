"""A device without tensors: what each slot of each page holds is one number that stands for a whole token prefix.

A key or value depends on its token and all tokens before it, and so does this number. A row that reads a stale,
foreign or unwritten slot therefore reads a wrong number, and is caught.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.step import Step, StepResult, TokenLogprobs

MASK = 2**64 - 1
Sampler = Callable[[int], list[int]]  # the last position's number -> the row's new tokens


def root_of(cache_salt: str | None) -> int:
    return 1 if cache_salt is None else 2 + zlib.crc32(cache_salt.encode())


def extend(prefix: int, token: int, weights: int = 0) -> int:
    """The number of a prefix one token longer, under these weights."""
    mixed = (prefix * 6364136223846793005 + (token + 1) * 1442695040888963407 + weights * 0x9E3779B97F4A7C15) & MASK
    return mixed ^ (mixed >> 29)


def drawn(prefix: int, index: int) -> int:
    """What a sample draws with: the prefix, and which sample it is."""
    return (prefix + index * 0xD1342543DE82EF95) & MASK


def greedy_of(vocab_size: int) -> Sampler:
    """A model: the next token is a function of the whole prefix."""
    return lambda prefix: [(prefix >> 17) % vocab_size]


def candidates(prefix: int, vocab_size: int, k: int) -> TokenLogprobs:
    """The `k` likeliest tokens after a prefix."""
    scores = sorted(((-1.0 - (extend(prefix, token, 7) >> 50) / 4096, token) for token in range(vocab_size)), key=_best)
    top = scores[:k]
    return TokenLogprobs(scores[0][1], scores[0][0], 1, [token for _, token in top], [score for score, _ in top])


def _best(entry: tuple[float, int]) -> tuple[float, int]:
    return -entry[0], entry[1]


def prompt_record(position: int, token: int, prefix: int) -> TokenLogprobs:
    """What a prompt position's record says: it depends on the token and all before it."""
    return TokenLogprobs(token, -(prefix % 1000) / 100, position, [], [])


def hidden_state(prefix: int) -> np.ndarray:
    """That of the last token of a prefix: whole numbers, so that sums of them are exact."""
    return np.array([(prefix >> shift) % 1021 for shift in (0, 16, 32)], np.float32)


def _ends(request: Request, token: int) -> bool:
    return token in request.eos_token_ids or token in request.stop_token_ids


class Slot:
    """What the device knows of a running request.

    Args:
      before: the slot's last tenant. If that is the same one, it is only told its tokens: its blocks are as they were.
    """

    def __init__(self, request: Request, block_ids: Sequence[int], before: "Slot | None"):
        self.request, self.life = request, request.num_preemptions
        self.history = list(request.all_token_ids)
        self.table = list(block_ids)
        self.root = root_of(request.cache_salt)
        self.prefixes: list[int] | None = None  # what its positions must hold; unknown before its first row
        if before is not None and before.request is request and before.life == self.life:
            self.prefixes = before.prefixes


class SimulatedDevice:
    """Runs steps in order, all writes of a step before its reads, and checks every read.

    Args:
      num_host_blocks: room for host copies.
      burst: rows may bring several tokens, if nothing forbids it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        sample: Sampler,
        *,
        vocab_size: int,
        num_host_blocks: int = 0,
        burst: bool = False,
    ):
        self.num_blocks, self.block_size, self.sample = num_blocks, block_size, sample
        self.vocab_size, self.num_host_blocks, self.burst = vocab_size, num_host_blocks, burst
        self.weights = 0
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.host: dict[int, list[list[int | None]]] = {}
        self.slots: list[Slot | None] = [None] * num_slots

    def launch(self, step: Step) -> None:
        """All of a step but sampling, in the order that `Step` lays down."""
        self._move(step)
        for admission in step.admissions:
            before = self.slots[admission.slot]
            self.slots[admission.slot] = Slot(admission.request, admission.block_ids, before)
        for slot, index, block in step.new_blocks:
            table = self._slot(slot).table
            assert index == len(table), f"slot {slot}: block {index} comes after {len(table)}"
            assert 1 <= block <= self.num_blocks, f"block {block} is not in the pool"
            table.append(block)
        rows = list(zip(step.slots, step.starts, step.num_tokens, strict=True))
        for slot, start, n in rows:
            self._write(self._slot(slot), start, n)
        for slot, start, n in rows:
            self._read(self._slot(slot), start + n)

    def sample_rows(self, step: Step, allowed: dict[int, list[int]]) -> StepResult:
        """Samples the rows of the step that was launched last.

        Args:
          allowed: of each masked row, the tokens that its grammar allows.
        """
        assert set(allowed) == set(step.masked)
        if step.num_steps > 1:
            return self._go_on(step)
        result = StepResult([], [] if step.wants_logprobs else None)
        for row, (slot, start, n, samples) in enumerate(
            zip(step.slots, step.starts, step.num_tokens, step.samples, strict=True)
        ):
            state = self._slot(slot)
            if samples:
                assert start + n == len(state.history), "samples before its end"
            tokens, records = self._sample(state, allowed.get(row)) if samples else ([], [])
            result.token_ids.append(tokens)
            if result.logprobs is not None:
                result.logprobs.append(records)
        result.prompt_logprobs = [self._score(step, r.row, r.first, r.num_tokens) for r in step.prompt_ranges]
        result.pooled = [self._pool(step, r.row, r.first, r.end) for r in step.pooled]
        return result

    def run(self, step: Step) -> StepResult:
        """A whole step without masked rows."""
        self.launch(step)
        return self.sample_rows(step, {})

    def _go_on(self, step: Step) -> StepResult:
        """Several steps, until a row ends."""
        assert set(step.num_tokens) == {1} and all(step.samples), "other rows than decodes"
        assert not (step.masked or step.wants_logprobs or step.prompt_ranges or step.pooled), "the host is needed"
        rows = [self._slot(slot) for slot in step.slots]
        result = StepResult([[] for _ in rows])
        for done in range(step.num_steps):
            if done:
                for row, start in zip(rows, step.starts, strict=True):
                    self._write(row, start + done, 1)
                for row, start in zip(rows, step.starts, strict=True):
                    self._read(row, start + done + 1)
            for row, tokens in zip(rows, result.token_ids, strict=True):
                tokens += self._sample(row, None, burst=False)[0]
            result.num_steps = done + 1
            if any(_ends(row.request, tokens[-1]) for row, tokens in zip(rows, result.token_ids, strict=True)):
                break
        for row in rows:  # the host will name these blocks again
            assert row.prefixes
            del row.table[-(-len(row.prefixes) // self.block_size) :]
        return result

    def drop(self, keys: list[int]) -> None:
        for key in keys:
            del self.host[key]

    def _move(self, step: Step) -> None:
        self.drop(step.dropped)
        for swap in step.swap_out:
            assert swap.key not in self.host
            self.host[swap.key] = [list(self.pages[block]) for block in swap.block_ids]
        for swap in step.swap_in:
            for block, page in zip(swap.block_ids, self.host.pop(swap.key), strict=True):
                self.pages[block] = page
        assert sum(map(len, self.host.values())) <= self.num_host_blocks, "more than the host holds"
        sources, targets = {a for a, _ in step.copies}, [b for _, b in step.copies]
        assert len({*sources, *targets}) == len(sources) + len(targets), "copies that depend on their order"
        for source, target in step.copies:
            self.pages[target] = list(self.pages[source])

    def _write(self, slot: Slot, start: int, n: int) -> None:
        if slot.prefixes is None:  # what came by cache, copy or swap
            prefix, slot.prefixes = slot.root, []
            for token in slot.history[:start]:
                prefix = extend(prefix, token, self.weights)
                slot.prefixes.append(prefix)
        assert start == len(slot.prefixes), f"starts at {start} with {len(slot.prefixes)} computed"
        prefix = slot.prefixes[-1] if slot.prefixes else slot.root
        for position in range(start, start + n):
            prefix = extend(prefix, slot.history[position], self.weights)
            slot.prefixes.append(prefix)
            self.pages[slot.table[position // self.block_size]][position % self.block_size] = prefix

    def _read(self, slot: Slot, length: int) -> None:
        held = [value for block in slot.table for value in self.pages[block]][:length]
        assert held == slot.prefixes, "a row reads what is not its own"

    def _sample(
        self, slot: Slot, allowed: list[int] | None, *, burst: bool = True
    ) -> tuple[list[int], list[TokenLogprobs]]:
        assert slot.prefixes
        request, prefix = slot.request, slot.prefixes[-1]
        tokens: list[int] = []
        records: list[TokenLogprobs] = []
        count = 1 + (prefix >> 40) % 3 if burst and self.burst and request.is_plain else 1
        for _ in range(count):
            draw = drawn(prefix, request.index)
            if (k := request.params.num_logprobs) is not None:
                records.append(candidates(prefix, self.vocab_size, k))
            if request.group is not None:
                tokens.append(records[-1].token_id)
            else:
                tokens += [allowed[(draw >> 17) % len(allowed)]] if allowed else self.sample(draw)
            prefix = extend(prefix, tokens[-1], self.weights)
        slot.history += tokens
        return tokens, records

    def _score(self, step: Step, row: int, first: int, num_tokens: int) -> list[TokenLogprobs]:
        slot = self._slot(step.slots[row])
        start, n = step.starts[row], step.num_tokens[row]
        assert slot.prefixes and num_tokens >= 1 and first >= 1
        assert start < first and first + num_tokens <= start + n + 1, "positions that the row does not feed"
        assert first + num_tokens <= slot.request.num_prompt_tokens, "positions beyond the prompt"
        return [prompt_record(p, slot.history[p], slot.prefixes[p - 1]) for p in range(first, first + num_tokens)]

    def _pool(self, step: Step, row: int, first: int, end: int) -> np.ndarray:
        slot = self._slot(step.slots[row])
        start, n = step.starts[row], step.num_tokens[row]
        assert slot.prefixes and start <= first < end <= start + n, "positions that the row does not feed"
        return np.sum([hidden_state(prefix) for prefix in slot.prefixes[first:end]], axis=0)

    def _slot(self, slot: int) -> Slot:
        state = self.slots[slot]
        assert state is not None, f"slot {slot} was never admitted"
        return state
