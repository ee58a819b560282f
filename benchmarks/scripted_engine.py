"""An engine without a model, for measuring what is around it: every step gives each request one token.

The token is the time. A client that reads a text knows from each of its pieces when the engine handed it out.
"""

from __future__ import annotations

import itertools
import json
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine.stats import EngineStats
from jaxpaged.text.tokenizer import Tokenizer

STAMP_CHARS = 3
_DIGITS = string.digits + string.ascii_lowercase
_STAMPS = ["".join(digits) for digits in itertools.product(_DIGITS, repeat=STAMP_CHARS)]
_NUMBERS = {stamp: number for number, stamp in enumerate(_STAMPS)}
_END = "<|end|>"
_RESOLUTION = 25e-6  # seconds; stamps come round again after 1.17 s

VOCAB_SIZE = len(_STAMPS) + 1
EOS = len(_STAMPS)


def stamp(now: float) -> str:
    """The text of the token that is handed out at a time of `time.monotonic`."""
    return _STAMPS[_number(now)]


def age(stamp: str, now: float) -> float:
    """Seconds from when a token with this text was handed out until `now`, of `time.monotonic`; less than 1.17."""
    period = len(_STAMPS) * _RESOLUTION
    return (now - _NUMBERS[stamp] * _RESOLUTION) % period


def _number(now: float) -> int:
    return int(now / _RESOLUTION) % len(_STAMPS)


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer whose tokens are the stamps, and the config of a model that would use it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {stamp: number for number, stamp in enumerate(_STAMPS)} | {_END: EOS}
    tokenizer = Backend(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "chat_template": "000 {{ messages[0].content }}",  # words are no tokens here
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")


class ScriptedEngine:
    """Steps at a fixed pace, or as fast as it can.

    Attributes:
      config: its options.
      vocab_size, eos_token_ids, hidden_size, pooling, num_programs, warm_programs, cold_programs: as an engine has
        them.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    num_programs = hidden_size = 0
    warm_programs: Mapping[str, Sequence[int]] = {}
    cold_programs: Mapping[str, Sequence[int]] = {}
    pooling = ""

    def __init__(self, config: EngineConfig, seconds_per_step: float = 0.0):
        """Args: seconds_per_step: a step that comes late is not made up for."""
        self.config = config
        self._pace = seconds_per_step
        self._due = 0.0
        self._live: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live))

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        pooling: PoolingParams | None = None,
        arrival_time: float | None = None,
    ) -> Request:
        assert self.config.max_model_len is not None
        options: dict[str, Any] = {"eos_token_ids": self.eos_token_ids, "arrival_time": arrival_time}
        return Request(request_id, prompt_token_ids, params, max_model_len=self.config.max_model_len, **options)

    def add_request(self, request: Request) -> None:
        self._live[request.request_id] = request

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        self._live.pop(request_id, None)
        return []

    def use_idle_time(self) -> bool:
        return False

    def step(self) -> list[RequestUpdate]:
        now = time.monotonic()
        if self._pace:
            self._due = max(self._due + self._pace, now)
            time.sleep(self._due - now)
            now = time.monotonic()
        token = _number(now)
        updates = []
        for request in list(self._live.values()):
            request.all_token_ids.append(token)
            update = RequestUpdate(request.request_id, [token])
            if len(request.all_token_ids) >= request.max_total_tokens:
                update.finish_reason = "length"
                del self._live[request.request_id]
            updates.append(update)
        return updates


def load(config: EngineConfig, _: Any) -> tuple[ScriptedEngine, Tokenizer]:
    """In place of `jaxpaged.engine.load.load_engine`; `config.model` is the seconds a step takes."""
    assert config.tokenizer is not None
    return ScriptedEngine(config, float(config.model)), Tokenizer.from_folder(Path(config.tokenizer))
