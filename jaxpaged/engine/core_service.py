"""What a core's process does: it loads the engine, tells how that goes, and then runs the core between its sockets."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_sockets import Input, Output
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.messages import Died, Failure, Ready, StartFailed
from jaxpaged.engine.programs import Programs
from jaxpaged.errors import EngineDeadError, JaxPagedError
from jaxpaged.text.grammar import GrammarCompiler

logger = logging.getLogger(__name__)


def serve_core(config: EngineConfig, engine: str, folder: Path, index: int) -> None:
    """Returns when the engine has failed, or has not started, and that has been said.

    Args:
      engine: "MODULE:NAME" of the function that makes the engine.
      folder: where the sockets are.
      index: of this core.
    """
    output = Output(folder, index)
    core = _start(config, engine, folder, index, output)
    if core is not None:
        _run(core, output)
    output.close()


def _start(config: EngineConfig, engine: str, folder: Path, index: int, output: Output) -> EngineCore | None:
    """Loads the engine and listens for its work, and says so; or says why not."""
    try:
        core, ready = _load(config, engine, output)
        collect_seldom()
        Input(folder, index, core).start()  # before the front is told that it may send
    except JaxPagedError as error:
        output.put(StartFailed(Failure.of(error)))
        return None
    except Exception as error:
        logger.critical("the engine does not start", exc_info=error)
        output.put(StartFailed(Failure.of(EngineDeadError(f"the engine does not start: {error!r}"))))
        return None
    output.put(ready)
    return core


def _load(config: EngineConfig, name: str, output: Output) -> tuple[EngineCore, Ready]:
    module, _, function = name.partition(":")
    load: Callable[[EngineConfig, Any], tuple[EngineLike, Any]] = getattr(importlib.import_module(module), function)
    engine, tokenizer = load(config, output.progress)
    core = EngineCore(engine, GrammarCompiler(tokenizer, engine.vocab_size, engine.eos_token_ids), output.put)
    core.prepare()
    facts = EngineFacts.of(engine)
    config = dataclasses.replace(facts.config, scheduling_key=None, logits_processors=())  # may hold functions
    return core, Ready(msgspec.structs.replace(facts, config=config), Programs.of(engine))


def _run(core: EngineCore, output: Output) -> None:
    try:
        core.run()
    except BaseException as error:
        logger.critical("the engine has failed", exc_info=error)
        output.put(Died(f"{type(error).__name__}: {error}"))
