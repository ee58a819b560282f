"""jaxpaged: LLM serving in pure JAX and Pallas.

Names are imported when first used, so that `jaxpaged.core` stays free of jax and importing allocates nothing on a
device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxpaged import errors

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.core.pooling_params import PoolingParams
    from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
    from jaxpaged.device.logits_processor import LogitsContext, LogitsProcessor
    from jaxpaged.engine.output import CompletionOutput, RequestOutput
    from jaxpaged.llm import LLM, generate

__version__ = "0.1.0"

_HOMES = {
    "EngineConfig": "jaxpaged.config",
    "PoolingParams": "jaxpaged.core.pooling_params",
    "SamplingParams": "jaxpaged.core.sampling_params",
    "StructuredOutputs": "jaxpaged.core.sampling_params",
    "LogitsContext": "jaxpaged.device.logits_processor",
    "LogitsProcessor": "jaxpaged.device.logits_processor",
    "CompletionOutput": "jaxpaged.engine.output",
    "RequestOutput": "jaxpaged.engine.output",
    "LLM": "jaxpaged.llm",
    "generate": "jaxpaged.llm",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LogitsContext",
    "LogitsProcessor",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "errors",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
