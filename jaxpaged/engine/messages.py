"""What passes between the front of an engine and its cores. Nothing else does; on the wire it is msgpack, never pickle.

Messages, updates and stats are arrays without field names; parameters, options and snapshots are maps with them.
Whoever decodes one checks it against the types here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxpaged import errors
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.snapshot import EngineSnapshot
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.stats import EngineStats


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An exception on its way to another process.

    Attributes:
      kind: its class, if that is one of `jaxpaged.errors`; else "".
      message: what it says.
      param: the field of a request that it blames.
    """

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What is told of an exception."""
        if isinstance(error, errors.JaxPagedError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("", repr(error))

    def exception(self) -> Exception:
        """An exception of the same class and with the same message; a RuntimeError for what is a bug of ours."""
        kind = getattr(errors, self.kind, None)
        if not isinstance(kind, type) or not issubclass(kind, errors.JaxPagedError):
            return RuntimeError(self.message)
        if issubclass(kind, errors.InvalidRequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


# From the front to a core.


class AddRequest(Message, frozen=True):
    """A request to be run, which the front has checked.

    Attributes:
      request_id: unique among the live requests of all cores.
      bad_word_ids: what `params.bad_words` are in tokens.
      arrival_time: as `time.monotonic` tells it, which all processes of a machine share.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    pooling: PoolingParams | None = None
    cache_salt: str | None = None
    priority: int = 0
    bad_word_ids: list[list[int]] = []


class Abort(Message, frozen=True):
    """Ends a request, or one sample of it; nothing comes of it any more. It need not be live."""

    request_id: str
    index: int | None = None


class Call(Message, frozen=True):
    """Calls one of the engine's methods that `core.CALLS` names. An `Answer` with its id comes back."""

    call_id: int
    method: str
    arguments: list[str | int | float | bool | None] = []


# From a core to the front.


class Progress(Message, frozen=True):
    """How far the core's start is; as the argument `progress` of `load_engine` is called."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True):
    """The engine is warm.

    Attributes:
      facts: about it; its options without those that are functions.
      programs: that are compiled.
    """

    facts: EngineFacts
    programs: Programs


class StartFailed(Message, frozen=True):
    """There will be no engine."""

    failure: Failure


class Updates(Message, frozen=True):
    """What a step did, one message a step; also sent, without updates, when something else has changed the stats.

    Attributes:
      time: when the step was over, as `time.monotonic` tells it.
    """

    updates: list[RequestUpdate]
    stats: EngineStats
    time: float


class Refused(Message, frozen=True):
    """A request has not been started."""

    request_id: str
    failure: Failure


class Answer(Message, frozen=True):
    """What a `Call` returned, or why it failed."""

    call_id: int
    result: EngineSnapshot | str | None = None
    failure: Failure | None = None


class Died(Message, frozen=True):
    """The engine has failed: the core's last message."""

    message: str


ToCore = AddRequest | Abort | Call
FromCore = Progress | Ready | StartFailed | Updates | Refused | Answer | Died


def encode(message: ToCore | FromCore) -> bytes:
    """A message as it is sent.

    Raises:
      TypeError, ValueError: the caller's parameters hold what cannot be sent.
    """
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode_to_core(frame: bytes | memoryview) -> ToCore:
    """Raises: msgspec.DecodeError: it is no message to a core."""
    return _TO_CORE.decode(frame)


def broken_request(frame: bytes | memoryview) -> str | None:
    """Of a frame that `decode_to_core` refuses, the id if it begins as an `AddRequest`; else None."""
    try:
        return _BEGINNING.decode(frame).request_id
    except (ValueError, RecursionError):
        return None


def decode_from_core(frame: bytes | memoryview) -> FromCore:
    """Raises: msgspec.DecodeError: it is no message from a core."""
    return _FROM_CORE.decode(frame)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


class _Beginning(msgspec.Struct, frozen=True, array_like=True, tag="AddRequest"):
    request_id: str


_BEGINNING = msgspec.msgpack.Decoder(_Beginning)
_TO_CORE = msgspec.msgpack.Decoder(ToCore)
_FROM_CORE = msgspec.msgpack.Decoder(FromCore)
