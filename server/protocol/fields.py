"""What the bodies share: how a fault is told, and the schema of a body for OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError


def invalid(param: str, message: str) -> PydanticCustomError:
    """A fault of a field, which the message names itself."""
    # The message goes in as a value: it may hold braces of the user's.
    return PydanticCustomError("invalid", "{message}", {"param": param, "message": message})


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

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
