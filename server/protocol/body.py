"""What all bodies have in common: nothing that they hold is ignored unless it is said to be."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.fields import unsupported
from server.protocol.refused import first_refused

_INT32 = 2**31 - 1


class Strict(BaseModel):
    """The base of all bodies and of the objects in them.

    A fault must not cost what the body costs: pydantic makes an error of each item that is wrong, of which there may be
    a million. So the first unknown name is the only one, and lists and dicts of a type end at their first fault:
    with `fail_fast` and with `pydantic.BeforeValidator`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_only_what_is_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = cls.known_names()
            for name in data:
                if name not in known:
                    raise PydanticCustomError("unknown", "unknown field", {"param": name})
        return data

    @classmethod
    def known_names(cls) -> frozenset[str]:
        """Of the fields, as they are sent."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


class Body(Strict):
    """The body of a request.

    Attributes:
      not_yet: fields that are known but not built -> values that ask for nothing, and are accepted.
    """

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = Field(None, description="A served model name; absent: the one that is served.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refused = first_refused(data, cls.not_yet)
        if refused is not None:
            raise unsupported(refused, data[refused])
        return {name: value for name, value in data.items() if name not in cls.not_yet}


class EngineBody(Body):
    """The body of a request for the engine."""

    priority: int | None = Field(
        None, ge=-_INT32 - 1, le=_INT32, description="Smaller goes first, with --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Cached prefixes are shared only with the same salt."
    )
    request_id: str | None = Field(
        None,
        max_length=256,
        pattern=r"^[\x20-\x7e]*$",  # as of X-Request-Id: it comes into logs, where a newline would begin another entry
        description="Part of the response's id. Printable ASCII characters.",
    )
    user: str | None = Field(None, description="Ignored.")
