"""What the bodies share: how a fault is told, and the schema of a body for OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from jaxpaged.core.sampling_params import MAX_BEAM_WIDTH, MAX_SAMPLES
from server.errors import shown
from server.protocol.refused import INSTEAD

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
# What SamplingParams allows, for the schema: the checks are there.
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_SAMPLES),
    "best_of": (1, MAX_SAMPLES),
    "temperature": (0, 100),
    "top_k": (-1, _INT32),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "seed": (-_INT64 - 1, _INT64),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 1e3),
    "min_tokens": (0, _INT32),
    "max_tokens": (0, _INT32),
    "max_completion_tokens": (0, _INT32),
    "timeout": (0, 1e9),
    "logprobs": (-1, _INT32),
    "top_logprobs": (-1, _INT32),
    "prompt_logprobs": (-1, _INT32),
    "beam_width": (1, MAX_BEAM_WIDTH),
    "length_penalty": (-10, 10),
    "truncate_prompt_tokens": (-1, _INT32),
}


def invalid(param: str, message: str) -> PydanticCustomError:
    """A fault of a field, which the message names itself."""
    # The message goes in as a value: it may hold braces of the user's.
    return PydanticCustomError("invalid", "{message}", {"param": param, "message": message})


def unsupported(param: str, value: Any, where: str = "") -> PydanticCustomError:
    """A field that asks for what is not built.

    Args:
      where: what the field is in, with a dot.
    """
    if param in INSTEAD:
        asked = f"{param} is not supported: use {INSTEAD[param]}"
    else:
        asked = f"{where}{param}={shown(value)} is not supported"
    return PydanticCustomError("unsupported", "{message}", {"param": param, "message": asked})


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` from its body; references are replaced by what they name."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            # A discriminator speaks of definitions too, and says nothing that the alternatives do not.
            return {key: inlined(value) for key, value in node.items() if key != "discriminator"}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    for name, (low, high) in RANGES.items():
        for kind in schema["properties"].get(name, {}).get("anyOf", ()):
            if kind.get("type") in ("integer", "number"):
                kind |= {"minimum": low, "maximum": high}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
