"""Logits to tokens and log-probabilities: a pure function of each row, whatever its neighbours.

Order: raw logits in float32 -> vocabulary padding -> allowed ids, grammar -> bad words -> min_tokens -> logit_bias ->
penalties -> users' processors -> (greedy?) -> temperature -> min_p, top_k, top_p -> sample -> log-probabilities. What
no row asks for costs nothing: it sits under a condition. Steps of rows without any `Feature` take `draw.most_likely`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.core.step import NONE_ALLOWED, NOT_FINITE
from jaxpaged.device.bans import bad_word_ends, ban_ids, keep_masked
from jaxpaged.device.draw import argmax, draw
from jaxpaged.device.gumbel import request_key
from jaxpaged.device.logits_processor import LogitsProcessor, apply_processors
from jaxpaged.device.logprobs import Logprobs, given_logprobs, mask_padding, no_logprobs, sampled_logprob, top_logprobs
from jaxpaged.device.nucleus import Limits, all_kept, kept, last_kept
from jaxpaged.device.options import Options
from jaxpaged.device.penalties import penalize
from jaxpaged.device.rows import in_place_if, over_rows
from jaxpaged.device.slots import NO_FEATURE, NO_TOKEN, Feature, Slots

_ADJUSTS = (
    Feature.ALLOWED_IDS
    | Feature.GRAMMAR
    | Feature.BAD_WORDS
    | Feature.MIN_TOKENS
    | Feature.LOGIT_BIAS
    | Feature.PENALTIES
    | Feature.PROCESSORS
)


class Sampled(NamedTuple):
    """Result for R rows; log-probabilities are zeros where a row wants none.

    Attributes:
      tokens: i32[R]; NOT_FINITE where the best of the raw logits is NaN or infinite, NONE_ALLOWED where only that of
        what the row's options have made of them is.
      logprobs: f32[R], of the sampled token.
      ranks: i32[R], 1 + the number of tokens that are more likely.
      top_ids, top_logprobs, top_ranks: i32/f32/i32[R, max_logprobs], most likely first; or of the row's
        `logprob_token_ids`, in their order.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    top_ranks: jax.Array


def sample(
    logits: jax.Array,
    slots: Slots,
    options: Options,
    rows: jax.Array,
    positions: jax.Array,
    masks: jax.Array,
    *,
    vocab_size: int,
    max_logprobs: int,
    processors: Sequence[LogitsProcessor] = (),
    without: Feature = NO_FEATURE,
) -> Sampled:
    """Samples a token per row.

    Args:
      logits: f32[R, V], raw.
      slots: the slots' sampling parameters.
      options: the slots' wide ones.
      rows: i32[R], each row's slot.
      positions: i32[R], the sequence position that the new token will take.
      masks: i32[R, ceil(V / 32)], what the rows with a grammar may produce; bit i of word w is token 32 w + i.
      vocab_size: tokens that may be produced; ids from there on are padding of the matrix.
      max_logprobs: columns of the top log-probabilities.
      processors: those that rows may ask for.
      without: what no row uses for certain; the program is the smaller for it.
    """
    features = slots.column("features", rows)
    used = jnp.bitwise_or.reduce(features)
    sampler = _Sampler(slots, options, vocab_size, max_logprobs, tuple(processors), without)

    applies = jnp.where((features & Feature.PROCESSORS != 0)[:, None], options.applies[rows], 0)
    own = _Branches(features, positions, applies)
    shared = _Branches(used, jnp.max(jnp.where(features & Feature.PENALTIES != 0, positions, 0)), applies.max(0))
    tokens, logprobs = over_rows(sampler.sample_row, (logits, rows, positions, masks), (own,), (shared,))
    return Sampled(tokens, *logprobs)


class _Branches(NamedTuple):
    """What decides about the work to do, see `over_rows`.

    Attributes:
      features: i32[].
      num_tokens: i32[], how far histories are looked at.
      applies: i32[P], which processors run.
    """

    features: jax.Array
    num_tokens: jax.Array
    applies: jax.Array


class _Row(NamedTuple):
    """A row besides its logits, see `sample`."""

    slot: jax.Array
    position: jax.Array
    mask: jax.Array


@dataclass(frozen=True)
class _Sampler:
    """What the rows of a batch have in common."""

    slots: Slots
    options: Options
    vocab_size: int
    max_logprobs: int
    processors: tuple[LogitsProcessor, ...]
    without: Feature

    def sample_row(
        self, logits: jax.Array, slot: jax.Array, position: jax.Array, mask: jax.Array, branches: _Branches
    ) -> tuple[jax.Array, Logprobs]:
        """Token and log-probabilities of one row.

        Args:
          logits: f32[V].
          slot, position: i32[].
          mask: i32[W].
        """
        raw = mask_padding(logits, self.vocab_size)
        logits, failure = jax.lax.cond(
            branches.features & _ADJUSTS != 0,
            lambda: (
                self._adjust(raw, slot, position, mask, branches),
                jnp.where(jnp.isfinite(jnp.max(raw)), NONE_ALLOWED, NOT_FINITE),
            ),
            lambda: (raw, jnp.asarray(NOT_FINITE)),
        )
        best, peak = argmax(logits)
        token = jax.lax.cond(
            branches.features & Feature.RANDOM != 0,
            lambda: jnp.where(
                self._uses(slot, Feature.RANDOM), self._draw(logits, peak, slot, position, branches), best
            ),
            lambda: best,
        )
        token = jnp.where(jnp.isfinite(peak), token, failure)
        if Feature.LOGPROBS in self.without:
            return token, no_logprobs(self.max_logprobs)

        def logprobs() -> Logprobs:
            return self._logprobs(self._source(raw, logits, peak, slot, token, branches), token, slot, branches)

        wanted = branches.features & Feature.LOGPROBS != 0
        return token, jax.lax.cond(wanted, logprobs, lambda: no_logprobs(self.max_logprobs))

    def _uses(self, slot: jax.Array, feature: Feature) -> jax.Array:
        return self.slots.column("features", slot) & feature != 0

    def _adjust(
        self, logits: jax.Array, slot: jax.Array, position: jax.Array, mask: jax.Array, branches: _Branches
    ) -> jax.Array:
        """Everything that changes logits before the temperature, in order."""
        for feature, change in self._changes(branches).items():
            if feature not in self.without:
                with jax.named_scope(str(feature.name).lower()):
                    wanted = branches.features & feature != 0
                    logits = in_place_if(wanted, change, logits, _Row(slot, position, mask))
        return logits

    def _changes(self, branches: _Branches) -> dict[Feature, Callable[[jax.Array, _Row], jax.Array]]:
        """Feature -> what it makes of a row's logits; the same logits if the row does not use it.

        A choice between logits before and after would take another array of them, so what is neutral is chosen sooner.
        """
        options = self.options

        def ids(feature: Feature, row: _Row, ids: jax.Array) -> jax.Array:
            return jnp.where(self._uses(row.slot, feature), ids, NO_TOKEN)

        def mask(feature: Feature, row: _Row, mask: jax.Array) -> jax.Array:
            return jnp.where(self._uses(row.slot, feature), mask, -1)

        def add_bias(x: jax.Array, row: _Row) -> jax.Array:
            biased = ids(Feature.LOGIT_BIAS, row, options.bias_ids[row.slot])
            return x.at[biased].add(options.bias_values[row.slot], mode="drop")

        return {
            Feature.ALLOWED_IDS: lambda x, row: keep_masked(
                x, mask(Feature.ALLOWED_IDS, row, options.allowed[row.slot])
            ),
            Feature.GRAMMAR: lambda x, row: keep_masked(x, mask(Feature.GRAMMAR, row, row.mask)),
            Feature.BAD_WORDS: lambda x, row: ban_ids(x, ids(Feature.BAD_WORDS, row, self._ended_words(row))),
            Feature.MIN_TOKENS: lambda x, row: ban_ids(x, ids(Feature.MIN_TOKENS, row, self._early_ends(row))),
            Feature.LOGIT_BIAS: add_bias,
            Feature.PENALTIES: lambda x, row: self._penalize(x, row, branches),
            Feature.PROCESSORS: lambda x, row: self._process(x, row, branches),
        }

    def _ended_words(self, row: _Row) -> jax.Array:
        words = self.options.bad_tokens[row.slot], self.options.bad_left[row.slot]
        return bad_word_ends(*words, self.slots.history[row.slot], row.position, self._num_prompt_tokens(row.slot))

    def _early_ends(self, row: _Row) -> jax.Array:
        early = row.position < self.slots.column("min_total_tokens", row.slot)
        return jnp.where(early, self.slots.stop_ids[row.slot], NO_TOKEN)

    def _penalize(self, logits: jax.Array, row: _Row, branches: _Branches) -> jax.Array:
        names = ("presence", "frequency", "repetition")
        by_name = {name: self.slots.column(f"{name}_penalty", row.slot) for name in names}
        counted = jnp.where(self._uses(row.slot, Feature.PENALTIES), row.position, 0)
        tokens = self.slots.history, row.slot, counted, self._num_prompt_tokens(row.slot)
        return penalize(logits, *tokens, limit=branches.num_tokens, **by_name)

    def _process(self, logits: jax.Array, row: _Row, branches: _Branches) -> jax.Array:
        own = self.options.applies[row.slot], self.options.arguments[row.slot]
        tokens = self.slots.history[row.slot], row.position, self._num_prompt_tokens(row.slot)
        processed = apply_processors(logits, self.processors, branches.applies, *own, *tokens)
        return jnp.where(self._uses(row.slot, Feature.PROCESSORS), processed, logits)

    def _num_prompt_tokens(self, slot: jax.Array) -> jax.Array:
        return self.slots.column("num_prompt_tokens", slot)

    def _limits(self, size: int, peak: jax.Array, slot: jax.Array, branches: _Branches) -> Limits:
        """What is to be kept of so many logits."""
        temperature, top_k, top_p, min_p = (
            self.slots.column(name, slot) for name in ("temperature", "top_k", "top_p", "min_p")
        )
        return Limits(
            peak=peak,
            temperature=jnp.where(temperature > 0, temperature, 1.0),
            top_k=jnp.where(top_k == 0, size, jnp.minimum(top_k, size)),
            top_p=top_p,
            floor=jnp.log(min_p),
            uses_top_k=branches.features & Feature.TOP_K != 0,
            uses_top_p=branches.features & Feature.TOP_P != 0,
        )

    def _draw(
        self, logits: jax.Array, peak: jax.Array, slot: jax.Array, position: jax.Array, branches: _Branches
    ) -> jax.Array:
        high, low, index = (self.slots.column(name, slot) for name in ("seed_high", "seed_low", "sample_index"))
        limits = self._limits(len(logits), peak, slot, branches)
        return draw(logits, request_key(high, low, index, position), limits)

    def _source(
        self,
        raw: jax.Array,
        logits: jax.Array,
        peak: jax.Array,
        slot: jax.Array,
        token: jax.Array,
        branches: _Branches,
    ) -> jax.Array:
        """What log-probabilities are of: raw logits, or processed ones, from which the token was sampled.

        Those of a greedy row are the logits before the temperature.
        """
        limits = self._limits(len(logits), peak, slot, branches)
        wanted = branches.features & Feature.PROCESSED_LOGPROBS != 0
        last = jax.lax.cond(
            wanted & (branches.features & Feature.RANDOM != 0),
            lambda: last_kept(logits, limits),
            lambda: all_kept(logits),
        )

        def choose(raw: jax.Array, logits: jax.Array) -> jax.Array:
            mask = kept(logits, limits, last)
            mask |= jnp.arange(len(logits)) == token  # sums in another order could leave it out at the border
            random = jnp.where(mask, limits.scaled(logits), -jnp.inf)
            processed = jnp.where(self._uses(slot, Feature.RANDOM), random, logits)
            return jnp.where(self._uses(slot, Feature.PROCESSED_LOGPROBS), processed, raw)

        return in_place_if(wanted, choose, raw, logits)

    def _logprobs(self, logits: jax.Array, token: jax.Array, slot: jax.Array, branches: _Branches) -> Logprobs:
        """Of the token, and of the most likely ones or those that the row names."""

        def instead(feature: Feature, make: Callable[[], Logprobs], otherwise: Logprobs) -> Logprobs:
            """What a row that uses the feature gets; made only if there is one."""
            uses = self._uses(slot, feature)
            return jax.lax.cond(
                branches.features & feature != 0,
                lambda: jax.tree.map(lambda a, b: jnp.where(uses, a, b), make(), otherwise),
                lambda: otherwise,
            )

        def given() -> Logprobs:
            ids = jnp.where(self._uses(slot, Feature.LOGPROB_IDS), self.options.logprob_ids[slot], NO_TOKEN)
            return given_logprobs(logits, token, ids, self.max_logprobs)

        logprobs = sampled_logprob(logits, token, self.max_logprobs)
        logprobs = instead(Feature.TOP_LOGPROBS, lambda: top_logprobs(logits, token, self.max_logprobs), logprobs)
        logprobs = instead(Feature.LOGPROB_IDS, given, logprobs)
        own = self._uses(slot, Feature.LOGPROBS)
        return jax.tree.map(lambda x: jnp.where(own, x, 0), logprobs)
