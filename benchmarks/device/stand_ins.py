"""Stand-ins for packages that a bare machine may lack, as far as the engine's inner half needs them."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from typing import Any


class Struct:
    """`msgspec.Struct` as a dataclass: the same constructor, without the encoding."""

    __struct_fields__: tuple[str, ...]

    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        made: Any = dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(made))


def install() -> list[str]:
    """Puts stand-ins where packages are missing; returns their names. Call it before importing jaxpaged."""
    if "msgspec" in sys.modules or importlib.util.find_spec("msgspec"):
        return []
    module = types.ModuleType("msgspec")
    structs = types.SimpleNamespace(fields=dataclasses.fields, replace=dataclasses.replace)
    module.Struct, module.structs = Struct, structs  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["msgspec"] = module
    return ["msgspec"]
