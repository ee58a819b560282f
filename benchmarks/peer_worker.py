"""Runs one engine: loads a model, then does the work that comes in as lines of JSON. Started by `peer_process`.

It runs in the engine's own environment, so each engine is imported only where it is used.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

DISTRIBUTIONS = {
    "jaxpaged": ("jaxpaged", "jax"),
    "vllm": ("vllm", "torch"),
    "transformers": ("transformers", "torch"),
    "llama.cpp": ("llama_cpp_python",),
}


class Made(NamedTuple):
    """What an engine made of some prompts.

    Attributes:
      outputs: ids, a list a prompt.
      first: when the last prompt got its first token, in seconds of `time.monotonic()`.
    """

    outputs: list[list[int]]
    first: float


class Engine(Protocol):
    """What is compared. `notes` says what a reader of the table should know."""

    notes: str

    def generate(self, prompts: list[list[int]], output_len: int) -> Made:
        """Greedy outputs of exactly `output_len` ids each."""
        ...


class Jaxpaged:
    """The package in the folder `checkout`, this one or another commit's."""

    def __init__(self, job: dict[str, Any]):
        sys.path.insert(0, job["checkout"])
        import jaxpaged

        found = Path(jaxpaged.__file__)
        if not found.is_relative_to(job["checkout"]):
            raise RuntimeError(f"jaxpaged came from {found}, not from {job['checkout']}")
        self._params = jaxpaged.SamplingParams
        self._llm = jaxpaged.LLM(
            job["model"],
            dtype=job["dtype"],
            max_model_len=job["max_len"],
            max_num_seqs=job["max_prompts"],
            kv_cache_bytes=job["kv_bytes"],
            use_tqdm=False,
        )
        self.notes = f"{self._llm.engine.num_programs} programs"

    def generate(self, prompts: list[list[int]], output_len: int) -> Made:
        params = self._params(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        made = self._llm.generate(prompts, params, use_tqdm=False)
        first = max(output.metrics.first_token_time or 0.0 for output in made)
        return Made([output.token_ids for output in made], first)


class Vllm:
    def __init__(self, job: dict[str, Any]):
        # By default it keeps a core for its scheduler; here it gets all, as the others do.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        preloaded = os.environ.get("LD_PRELOAD")
        self._params = SamplingParams
        self._llm = LLM(
            job["model"],
            dtype=job["dtype"],
            max_model_len=job["max_len"],
            max_num_seqs=job["max_prompts"],
            kv_cache_memory_bytes=job["kv_bytes"],
            disable_log_stats=False,  # they hold the time of the first token
        )
        self.notes = f"preloaded: {', '.join(Path(p).name for p in preloaded.split(':')) if preloaded else 'nothing'}"

    def generate(self, prompts: list[list[int]], output_len: int) -> Made:
        params = self._params(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        made = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        outputs = [list(output.outputs[0].token_ids) for output in made]
        return Made(outputs, max(output.metrics.first_token_ts for output in made))


class Transformers:
    notes = "one static batch"

    def __init__(self, job: dict[str, Any]):
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))

    def generate(self, prompts: list[list[int]], output_len: int) -> Made:
        ids, arrivals = self._torch.tensor(prompts), Arrivals()
        options = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False, "streamer": arrivals}
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **options)
        return Made(out[:, ids.shape[1] :].tolist(), arrivals.times[1])


class Arrivals:
    """A streamer of transformers that notes when it was given something: the prompts, then each step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


class LlamaCpp:
    """All sequences in one batch of llama.cpp's own interface; the high-level one runs them one by one."""

    notes = "one batch, unified cache"
    _FTYPES: dict[str, int] = {"float32": 0, "float16": 1, "bfloat16": 32}  # noqa: RUF012

    def __init__(self, job: dict[str, Any]):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self._c = c = llama_cpp
        self._quiet = c.llama_log_callback(lambda *_: None)  # C keeps calling it: it must outlive this method
        c.llama_log_set(self._quiet, None)
        c.llama_backend_init()
        path = self._requantized(job)
        self._model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        options = c.llama_context_default_params()
        options.n_ctx = job["kv_tokens"]
        options.n_batch, options.n_ubatch, options.n_seq_max = 2048, 512, job["max_prompts"]
        options.n_threads = options.n_threads_batch = job["threads"]
        options.kv_unified = True
        self._context = c.llama_init_from_model(self._model, options)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(options.n_batch, 0, 1)
        self._capacity = options.n_batch

    def _requantized(self, job: dict[str, Any]) -> str:
        """The model with its weights in the dtype asked for, as the other engines have them."""
        c, path = self._c, Path(job["scratch"]) / f"model-{job['dtype']}.gguf"
        if not path.exists():
            options = c.llama_model_quantize_default_params()
            options.ftype, options.allow_requantize, options.nthread = self._FTYPES[job["dtype"]], True, job["threads"]
            if c.llama_model_quantize(job["model"].encode(), str(path).encode(), options):
                raise RuntimeError(f"llama.cpp could not convert {job['model']}")
        return str(path)

    def generate(self, prompts: list[list[int]], output_len: int) -> Made:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        tokens = (
            (s, position, token, position == len(ids) - 1)
            for s, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        )
        self._decode(tokens, outputs)
        first = time.monotonic()
        for _ in range(output_len - 1):
            last = [(s, len(prompts[s]) + len(out) - 1, out[-1], True) for s, out in enumerate(outputs)]
            self._decode(iter(last), outputs)
        return Made(outputs, first)

    def _decode(self, tokens: Iterator[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Feeds (sequence, position, token, wants output) and appends each wanted argmax to its sequence's output."""
        done = False
        while not done:
            wanted: list[tuple[int, int]] = []
            count = 0
            while count < self._capacity:
                item = next(tokens, None)
                if item is None:
                    done = True
                    break
                sequence, position, token, wants = item
                batch = self._batch
                batch.token[count], batch.pos[count], batch.logits[count] = token, position, wants
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                if wants:
                    wanted.append((sequence, count))
                count += 1
            if not count:
                return
            self._batch.n_tokens = count
            if self._c.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")
            for sequence, index in wanted:
                outputs[sequence].append(self._argmax(index))

    def _argmax(self, index: int) -> int:
        import numpy as np

        logits = self._c.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


ENGINES: dict[str, type] = {
    "jaxpaged": Jaxpaged,
    "vllm": Vllm,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def prompts(work: dict[str, Any]) -> list[list[int]]:
    """The same random ids for every engine, from what no usual vocabulary has special tokens at.

    They differ from the first id on with the seed, but for `shared_len` ids at the start of every prompt.
    """
    source = random.Random(work["seed"])

    def draw(count: int) -> list[int]:
        return [source.randrange(100, 40_000) for _ in range(count)]

    shared = draw(work["shared_len"])
    return [shared + draw(work["own_len"]) for _ in range(work["num_prompts"])]


def versions(engine: str) -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS[engine]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "checkout"
    if engine == "llama.cpp":
        found["llama_cpp"] = found.pop("llama_cpp_python")
    return found


def main() -> None:
    # Messages go out on the original standard output; whatever an engine prints goes to standard error.
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    job = json.loads(sys.argv[1])
    engine: Engine = ENGINES[job["engine"]](job)
    engine.generate([[100]], 1)
    print(json.dumps({"versions": versions(job["engine"]), "notes": engine.notes}), file=messages)
    small = {"shared_len": 0, "own_len": min(8, job["max_len"] // 2)}
    for count in {1, job["max_prompts"]}:  # once unmeasured: whatever is made lazily is made now
        engine.generate(prompts(small | {"num_prompts": count, "seed": f"warm-up of {count}"}), 2)
    for line in sys.stdin:
        work = json.loads(line)
        batch = prompts(work)
        start = time.monotonic()
        made = engine.generate(batch, work["output_len"])
        seconds = time.monotonic() - start
        lengths = {len(output) for output in made.outputs}
        if lengths != {work["output_len"]}:
            raise RuntimeError(f"asked for {work['output_len']} tokens, got {sorted(lengths)}")
        answer = {"seconds": seconds, "first_token_s": made.first - start, "token_ids": made.outputs}
        print(json.dumps(answer), file=messages)


if __name__ == "__main__":
    main()
