"""Users' own functions of the logits: registered with the engine, asked for by name, run on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.errors import ConfigError, InvalidRequestError

Argument = float | tuple[float, ...] | None


class LogitsContext(NamedTuple):
    """What a processor may look at besides the logits: one sequence, never its neighbours.

    Attributes:
      token_ids: i32[max_model_len], prompt and output; zeros after `num_tokens`.
      num_tokens: i32[], tokens so far: the position of the token that is about to be sampled.
      num_prompt_tokens: i32[], how many of them are the prompt.
      arguments: the request's, by name: f32[], or f32[k] where the default has k numbers.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    num_prompt_tokens: jax.Array
    arguments: dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A named function of one row's logits.

    It runs after the penalties and before the temperature for the rows that ask for it, one by one: under `lax.map` on
    CPU, under `jax.vmap` elsewhere. What is banned before it stays banned. A row that it makes NaN or infinite ends
    with an error, alone.

    Attributes:
      name: what requests call it.
      function: `(f32[V], LogitsContext) -> f32[V]`, traceable by JAX; V counts the padding rows of the head.
      arguments: name -> default: a number, or a tuple of numbers of fixed length; None: a number that every request
        must give.
    """

    name: str
    function: Callable[[jax.Array, LogitsContext], jax.Array]
    arguments: Mapping[str, Argument] = field(default_factory=dict)

    @property
    def num_floats(self) -> int:
        """Floats that its arguments take."""
        return sum(_length(default) for default in self.arguments.values())

    def split(self, floats: jax.Array) -> dict[str, jax.Array]:
        """Arguments by name from a row of `num_floats`."""
        arguments, at = {}, 0
        for name, default in self.arguments.items():
            length = _length(default)
            arguments[name] = floats[at : at + length] if isinstance(default, tuple) else floats[at]
            at += length
        return arguments


def check_processors(processors: Sequence[Any], vocab_rows: int, max_model_len: int) -> tuple[LogitsProcessor, ...]:
    """The processors as a tuple, if each can be run.

    Args:
      processors: what the engine was given.
      vocab_rows: V, rows of the head.

    Raises ConfigError naming the processor that is none, is there twice, or does not give what it is given.
    """
    names: set[str] = set()
    for processor in processors:
        if not isinstance(processor, LogitsProcessor) or not isinstance(processor.name, str) or not processor.name:
            raise ConfigError(f"logits_processors holds {processor!r:.80}, not a LogitsProcessor with a name")
        if processor.name in names:
            raise ConfigError(f"two logits processors are called {processor.name!r}")
        names.add(processor.name)
        for name, default in processor.arguments.items():
            if default is not None and not _fits(default, default):
                raise ConfigError(
                    f"logits processor {processor.name!r}: default {name}={default!r:.80} is no finite number, "
                    "no tuple of such, and not None"
                )
        _check_function(processor, vocab_rows, max_model_len)
    return tuple(processors)


def pack_arguments(
    processors: Sequence[LogitsProcessor], asked: Mapping[str, Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Which processors a request asks for, i32[P], and the arguments of all, f32[A].

    Raises InvalidRequestError for names nobody registered and for arguments that are missing, unknown or no numbers.
    """
    known = [processor.name for processor in processors]
    for name in asked:
        if name not in known:
            raise _invalid(f"no logits processor is called {name!r:.80}; known: {known}")
    floats: list[float] = []
    for processor in processors:
        given = asked.get(processor.name)
        floats += _arguments(processor, given) if given is not None else [0.0] * processor.num_floats
    return np.array([name in asked for name in known], np.int32), np.array(floats, np.float32)


def apply_processors(
    logits: jax.Array,
    processors: Sequence[LogitsProcessor],
    traced: jax.Array,
    applies: jax.Array,
    floats: jax.Array,
    history: jax.Array,
    num_tokens: jax.Array,
    num_prompt_tokens: jax.Array,
) -> jax.Array:
    """One row's logits, f32[V], after the processors that it asks for, in their order.

    Args:
      traced: i32[P], which ones run at all.
      applies: i32[P], which ones the row asks for.
      floats: f32[A], `pack_arguments`.
      history: i32[max_model_len], of which the first `num_tokens` are this request's.
    """
    tokens = jnp.where(jnp.arange(len(history)) < num_tokens, history, 0)
    at = 0
    for i, processor in enumerate(processors):
        arguments = processor.split(floats[at : at + processor.num_floats])
        at += processor.num_floats
        context = LogitsContext(tokens, num_tokens, num_prompt_tokens, arguments)

        def run(logits: jax.Array, processor=processor, context=context, asked=applies[i] != 0) -> jax.Array:
            with jax.named_scope(processor.name):
                return jnp.where(asked & (logits > -jnp.inf), processor.function(logits, context), logits)

        logits = jax.lax.cond(traced[i] != 0, run, lambda logits: logits, logits)
    return logits


def _check_function(processor: LogitsProcessor, vocab_rows: int, max_model_len: int) -> None:
    number = jax.ShapeDtypeStruct((), jnp.int32)
    logits = jax.ShapeDtypeStruct((vocab_rows,), jnp.float32)
    arguments = {
        name: jax.ShapeDtypeStruct((len(default),) if isinstance(default, tuple) else (), jnp.float32)
        for name, default in processor.arguments.items()
    }
    token_ids = jax.ShapeDtypeStruct((max_model_len,), jnp.int32)

    def run(logits: jax.Array, *context: Any) -> jax.Array:
        return processor.function(logits, LogitsContext(*context))

    try:
        result = jax.eval_shape(run, logits, token_ids, number, number, arguments)
    except Exception as error:  # whatever the user's code raises is told as what it is: a wrong option
        raise ConfigError(f"logits processor {processor.name!r} cannot be traced: {error}") from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    if (shape, dtype) != (logits.shape, logits.dtype):
        raise ConfigError(
            f"logits processor {processor.name!r} makes {dtype}{list(shape) if shape is not None else ''} of "
            f"float32[{vocab_rows}]"
        )


def _arguments(processor: LogitsProcessor, given: Mapping[str, Any]) -> list[float]:
    """A request's arguments in order, defaults filled in."""
    unknown = [name for name in given if name not in processor.arguments]
    if unknown:
        raise _invalid(
            f"logits processor {processor.name!r} takes no {', '.join(map(repr, unknown)):.80}; it takes "
            f"{list(processor.arguments)}"
        )
    floats: list[float] = []
    for name, default in processor.arguments.items():
        value = given.get(name, default)
        if value is None:
            raise _invalid(f"logits processor {processor.name!r} needs {name!r}")
        if not _fits(value, default):
            wanted = f"{len(default)} finite numbers" if isinstance(default, tuple) else "a finite number"
            raise _invalid(f"logits processor {processor.name!r}: {name}={value!r:.80} is not {wanted}")
        floats += [float(x) for x in value] if isinstance(default, tuple) else [float(value)]
    return floats


def _fits(value: Any, default: Argument) -> bool:
    """Whether a value has the form of the default, in numbers that float32 can hold."""
    if isinstance(default, tuple):
        return isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_finite, value))
    return _finite(value)


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    try:
        return math.isfinite(value) and abs(float(value)) <= float(np.finfo(np.float32).max)
    except OverflowError:  # an int beyond every float
        return False


def _length(default: Argument) -> int:
    return len(default) if isinstance(default, tuple) else 1


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="logits_processors")
