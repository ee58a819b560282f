"""Every exception that jaxpaged raises on purpose.

    JaxPagedError
    ├── InvalidRequestError (ValueError)      the caller's mistake in one request: HTTP 400
    │   └── RequestTooLargeError              it can never fit the context or the KV cache
    ├── QueueFullError (RuntimeError)         too many requests wait already: HTTP 503
    ├── UnavailableError (RuntimeError)       the machine has not now what a request needs: HTTP 503
    ├── ConfigError (ValueError)              an engine option is out of range or contradicts another
    ├── ModelError (ValueError)               the model cannot be used
    │   ├── ModelNotFoundError                no such folder, file or name
    │   ├── UnknownModelTypeError             no file in jaxpaged/models for its model_type
    │   └── CheckpointError                   tensors missing, unused or mis-shaped; all are listed
    ├── UnsupportedError (NotImplementedError)    valid, but this implementation lacks it
    ├── EngineDeadError (RuntimeError)        the engine loop failed; nothing more will be served
    └── RecompilationError (RuntimeError)     strict mode: a shape compiled after warm-up

A message names the offending value. `assert` is for our own bugs only.
"""

from collections.abc import Sequence


class JaxPagedError(Exception):
    """Base of all errors raised by jaxpaged."""


class InvalidRequestError(JaxPagedError, ValueError):
    """One request is wrong; nothing else is disturbed.

    Attributes:
      param: name of the offending field, as in the OpenAI error object; None if it is no single one.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class RequestTooLargeError(InvalidRequestError):
    """The request can never fit the model's context or the KV cache."""


class QueueFullError(JaxPagedError, RuntimeError):
    """As many requests wait as the engine lets wait; a later try may succeed."""


class UnavailableError(JaxPagedError, RuntimeError):
    """What one request needs cannot be had now, such as a process or a file; a later try may succeed."""


class ConfigError(JaxPagedError, ValueError):
    """An engine option is out of range or contradicts another one."""


class ModelError(JaxPagedError, ValueError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No model of that name could be found."""


class UnknownModelTypeError(ModelError):
    """No implementation exists for this `model_type`."""


class CheckpointError(ModelError):
    """The checkpoint's tensors do not match the model; every mismatch is listed at once."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unused: Sequence[str] = (),
        misshaped: Sequence[str] = (),
    ):
        self.missing, self.unused, self.misshaped = tuple(missing), tuple(unused), tuple(misshaped)
        parts = [message]
        for title, names in (("missing", missing), ("unused", unused), ("mis-shaped", misshaped)):
            if names:
                parts.append(f"{len(names)} {title}: " + ", ".join(names))
        super().__init__("\n  ".join(parts))


class UnsupportedError(JaxPagedError, NotImplementedError):
    """A valid wish that this implementation cannot fulfil."""


class EngineDeadError(JaxPagedError, RuntimeError):
    """The engine loop failed; pending and later requests get this error."""


class RecompilationError(JaxPagedError, RuntimeError):
    """Strict mode: a program was compiled after warm-up."""


def reason(error: BaseException) -> str:
    """What an exception says, for a message that names what it is about: of the system's, no number and no path."""
    return getattr(error, "strerror", None) or str(error)
