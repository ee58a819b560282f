"""Engines for cores in processes of their own, without a model: `load` is named to `ProcessClient`.

`EngineConfig.model` says what they do, "echo delay=0.01"; some prompts do something to the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.errors import ModelError
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine
from tests.tiny_tokenizers import TinyTokenizer

LOAD = "tests.scripted_core:load"
HANGS = "SCRIPTED_CORE_HANGS"  # names a file that a core makes when it hangs
EOS = 2
TOKENIZER = tiny_tokenizers.byte_level()


def load(config: EngineConfig, progress: Any) -> tuple[FakeEngine, TinyTokenizer]:
    """In place of `jaxpaged.engine.load.load_engine`."""
    kind, *options = config.model.split()
    if kind == "wrong":
        raise ModelError("there is no such model")
    if kind == "exit":
        os._exit(3)
    if kind == "bug":
        raise KeyError("a bug")
    if kind == "slow":
        time.sleep(600)
    for done in (0, 5, 10):
        progress("load", done, 10)
    progress("warm-up", 3, 3)
    engine: FakeEngine

    def script(request: Request) -> Sequence[int]:
        text = TOKENIZER.decode(request.prompt_token_ids)
        if text == "fail":
            engine.fail_with = RuntimeError("device lost")
        elif text == "exit":
            os._exit(3)
        elif text == "hang":
            if HANGS in os.environ:
                Path(os.environ[HANGS]).touch()
            time.sleep(600)
        return [5] if text.startswith("long") else [*request.prompt_token_ids, EOS]

    given = dict(option.split("=") for option in options)
    limit = given.pop("queue_limit", None)
    engine = FakeEngine(
        script,
        vocab_size=TOKENIZER.vocab_size,
        eos_token_ids=[EOS],
        delay=float(given.pop("delay", 0)),
        logits_processors=config.logits_processors,
        **{name: int(value) for name, value in given.items()},
    )
    engine.queue_limit = None if limit is None else int(limit)
    return engine, TOKENIZER
