"""What all bodies have in common: nothing that they hold is ignored unless it is said to be."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import shown
from server.protocol.fields import invalid
from server.protocol.refused import INSTEAD, first_refused

_INT32 = 2**31 - 1


class Body(BaseModel):
    """The body of a request.

    Attributes:
      not_yet: fields that are known but not built -> values that ask for nothing, and are accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = Field(None, description="A served model name; absent: the one that is served.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        for name in data:  # one fault is enough to be told of: there might be a million
            if name not in fields and name not in cls.not_yet:
                raise invalid(name, f"unknown field {name!r:.80}; it is refused rather than ignored")
        refused = first_refused(data, cls.not_yet)
        if refused is not None:
            hint = f"; use {INSTEAD[refused]}" if refused in INSTEAD else ""
            context = {"param": refused, "shown": shown(data[refused]), "hint": hint}
            raise PydanticCustomError("unsupported", "{param}={shown} is not supported{hint}", context)
        return {name: value for name, value in data.items() if name in fields}


class EngineBody(Body):
    """The body of a request for the engine."""

    priority: int | None = Field(
        None, ge=-_INT32 - 1, le=_INT32, description="Smaller goes first, with --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Cached prefixes are shared only with the same salt."
    )
    request_id: str | None = Field(None, max_length=256, description="Part of the response's id.")
    user: str | None = Field(None, description="Ignored.")
