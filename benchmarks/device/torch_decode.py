"""The same decode steps on HF transformers: random weights in bfloat16, static cache, SDPA; beside the engine's."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import configs, record
from benchmarks.device.worker import Context, Report

CONTEXT, STEPS = 1024, 24


def run(report: Report, context: Context) -> None:
    if importlib.util.find_spec("torch") is None:
        report.run("torch", _missing)
        return
    held: list[Peer] = []
    report.run("torch", lambda: held.append(Peer(context)) or held[0].facts(), needs=15)
    if not held:
        return
    peer = held[0]
    for rows in (2,) if context.tiny else (32, 1):
        report.run(f"torch decode {rows}", partial(peer.decode, rows), needs=5)
    if not context.tiny:
        for rows in (1, 32):
            report.run(f"torch compiled decode {rows}", partial(peer.decode, rows, compiled=True), needs=40)


class Peer:
    """A random model of transformers on the GPU; on the CPU for `tiny`.

    Raises:
      NotImplementedError: torch sees no GPU.
    """

    def __init__(self, context: Context):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch = _torch()
        self.device = "cpu" if context.tiny else "cuda"
        if not context.tiny and not torch.cuda.is_available():
            raise NotImplementedError("torch sees no GPU")
        name = "tiny-llama" if context.tiny else "llama-3.1-8b"
        raw: dict[str, Any] = {**configs.load(name), "attn_implementation": "sdpa"}
        self.config = LlamaConfig(**raw)
        self.context, self.steps = (12, 3) if context.tiny else (CONTEXT, STEPS)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device), torch.no_grad():
                self.model = LlamaForCausalLM(self.config).eval()
        finally:
            torch.set_default_dtype(default)
        self._finish()

    def facts(self) -> Mapping[str, Any]:
        return {
            "param_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "dtype": str(self.model.dtype),
            "versions": record.versions(("torch", "transformers")),
        }

    def decode(self, rows: int, *, compiled: bool = False) -> Mapping[str, Any]:
        """Greedy steps of `rows` rows after a prompt; medians."""
        from transformers import StaticCache

        torch = _torch()
        total = self.context + self.steps + 8
        cache = StaticCache(config=self.config, max_cache_len=total)
        ids = torch.randint(0, self.config.vocab_size, (rows, self.context), device=self.device)
        forward: Callable[..., Any] = self.model.forward
        if compiled:
            forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
        times = []
        with torch.no_grad():
            token = self._next(self.model.forward, ids, cache, 0)
            self._finish()
            for i in range(self.steps):
                start = time.perf_counter()
                token = self._next(forward, token, cache, self.context + i)
                self._finish()
                times.append(time.perf_counter() - start)
        seconds = statistics.median(times[self.steps // 3 :])
        return {"ms": 1e3 * seconds, "tokens_per_s": rows / seconds}

    def _next(self, forward: Callable[..., Any], ids: Any, cache: Any, start: int) -> Any:
        """The next token [rows, 1] after `ids`, which stand at `start`."""
        positions = _torch().arange(start, start + ids.shape[1], device=self.device)
        out = forward(
            input_ids=ids,
            past_key_values=cache,
            position_ids=positions[None],
            cache_position=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1:].argmax(-1).clone()

    def _finish(self) -> None:
        if self.device == "cuda":
            _torch().cuda.synchronize()


def _torch() -> Any:
    """The module; no checkout of ours has it."""
    return importlib.import_module("torch")


def _missing() -> Mapping[str, Any]:
    raise ModuleNotFoundError("torch is not installed")
