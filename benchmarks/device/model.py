"""A whole model through the engine's own step program, beside what memory and arithmetic allow.

Random weights of Llama-3.1-8B in bfloat16. Rows of a decode have their context as if it were computed before: pages of
arbitrary numbers, all distinct.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device import launches, stand_ins
from benchmarks.device.pools import arbitrary_pool
from benchmarks.device.worker import Context, Report

STAND_INS = stand_ins.install()

from benchmarks import configs  # noqa: E402
from benchmarks.device import roofline, work  # noqa: E402
from jaxpaged import models  # noqa: E402
from jaxpaged.config import EngineConfig, resolve  # noqa: E402
from jaxpaged.core.block_manager import BlockManager  # noqa: E402
from jaxpaged.core.request import Request  # noqa: E402
from jaxpaged.core.sampling_params import SamplingParams  # noqa: E402
from jaxpaged.core.scheduler import Scheduler  # noqa: E402
from jaxpaged.core.step import Admission, Step  # noqa: E402
from jaxpaged.device.abstract_step import weight_bytes  # noqa: E402
from jaxpaged.device.buckets import Bucket, BucketTable  # noqa: E402
from jaxpaged.device.platform import platform  # noqa: E402
from jaxpaged.device.runner import Runner  # noqa: E402
from jaxpaged.device.step_program import (  # noqa: E402
    FORWARD_DONATED,
    SAMPLE_DONATED,
    compiler_options,
    forward_arguments,
    make_forward,
    make_sample_plain,
    sample_plain_arguments,
)
from jaxpaged.engine.engine import Engine  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
      config: see `configs.load`; changes: to it.
      decodes: numbers of rows; prefills: numbers of tokens.
      context: tokens before the first decode step; steps: timed, after `warm` others.
      requests, output: of the run of the whole engine, each with `context` tokens in.
    """

    config: str
    changes: Mapping[str, Any]
    decodes: tuple[int, ...]
    prefills: tuple[int, ...]
    context: int
    steps: int
    requests: int
    output: int
    warm: int = 4


FULL = Sizes("llama-3.1-8b", {}, (1, 32, 256), (4096, 8192), 1024, 40, 32, 64)
TINY = Sizes("tiny-llama", {"vocab_size": 256, "num_hidden_layers": 1}, (2,), (16,), 12, 3, 2, 4, warm=1)

COMMANDS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "WHILE", "DYNAMIC_SLICE_FUSION")
# Name -> compiler options that differ from the engine's; None: without that option.
VARIANTS: dict[str, dict[str, Any]] = {
    "all in graphs": {"xla_gpu_enable_command_buffer": ",".join(COMMANDS)},
    "without graphs": {"xla_gpu_enable_command_buffer": ""},
    "with split-K": {"xla_gpu_experimental_force_split_k": None},
}


def run(report: Report, context: Context) -> None:
    held: list[Model] = []

    def build() -> Mapping[str, Any]:
        held.append(Model(TINY if context.tiny else FULL, context))
        return held[0].facts()

    report.run("model", build, needs=20)
    if not held:  # nothing to go on with; when restarted, the row is on file and the model is not
        held.append(Model(TINY if context.tiny else FULL, context))
    model, sizes = held[0], held[0].sizes
    some, few, many = sizes.decodes[len(sizes.decodes) // 2], sizes.decodes[0], sizes.decodes[-1]
    items = {
        f"decode {some}": partial(model.decode, some),
        f"decode {few}": partial(model.decode, few),
        f"prefill {sizes.prefills[-1]}": partial(model.prefill, sizes.prefills[-1]),
    }
    variants = {f"decode {some} {variant}": partial(model.decode, some, variant) for variant in VARIANTS}
    if platform() == "gpu":
        items |= dict(list(variants.items())[:1])
    items |= {
        f"host {many}": partial(host, many, context),
        f"decode {many}": partial(model.decode, many),
        f"prefill {sizes.prefills[0]}": partial(model.prefill, sizes.prefills[0]),
        f"engine {sizes.requests} x {sizes.context}": model.engine,
    }
    if platform() == "gpu":
        items |= variants
    for name, measure in items.items():
        report.run(name, measure, needs=0.0 if name.startswith("host") else 1.1 * model.compile_seconds)


class Model:
    """A model, its runner, and what is timed of them.

    Attributes:
      compile_seconds: that the last program took.
    """

    def __init__(self, sizes: Sizes, context: Context):
        self.sizes, self._context = sizes, context
        self.compile_seconds = 0.0
        raw = {**configs.load(sizes.config), **sizes.changes}
        family = models.get_family(raw["model_type"])
        self.config = family.config_from_hf(raw)
        max_len = max(*sizes.prefills, sizes.context + sizes.warm + sizes.steps, sizes.context + sizes.output) + 16
        rows = max(sizes.decodes)
        self._pages_each = -(-(sizes.context + sizes.warm + sizes.steps + 1) // EngineConfig.block_size)
        blocks = max(rows * self._pages_each, -(-max_len // EngineConfig.block_size))
        options = EngineConfig(
            dtype="bfloat16",
            max_model_len=max_len,
            max_num_seqs=rows,
            max_num_batched_tokens=max(*sizes.prefills, rows),
            num_kv_blocks=max(blocks, sizes.requests * (-(-(sizes.context + sizes.output) // 16) + 1)),
            attention_implementation="xla" if context.implementation == "xla" else None,
        )
        self.options = resolve(
            options,
            platform=platform(),
            native_bfloat16=True,
            checkpoint_dtype="bfloat16",
            model_max_len=self.config.max_context_len,
        )
        module = family.module(config=self.config.for_context(max_len), dtype=jnp.bfloat16)
        self.params = models.random_params(module)
        buckets = BucketTable(list(sizes.decodes), list(sizes.prefills), rows)
        self.runner = Runner(module, self.params, self.options, vocab_size=self.config.vocab_size, buckets=buckets)
        shape, dtype = self.runner.kv_pages.shape, self.runner.kv_pages.dtype
        self.runner.kv_pages.delete()  # there may not be room for two
        self.runner.kv_pages = arbitrary_pool(shape, dtype)
        jax.block_until_ready((self.runner.kv_pages, self.params))

    def facts(self) -> Mapping[str, Any]:
        """Sizes in bytes."""
        return {
            "config": self.sizes.config,
            "param_bytes": weight_bytes(self.params),
            "pool_bytes": self.runner.kv_pages.nbytes,
            "stand_ins": STAND_INS,
        }

    def decode(self, rows: int, variant: str = "") -> Mapping[str, Any]:
        """Steps of `rows` requests, each launched before the one before it is collected."""
        sizes, runner = self.sizes, self.runner
        forwards, samplers = dict(runner.programs), dict(runner.samplers.plain)
        found = self._compile(Bucket(rows, rows), variant)
        steps = [self._decode_step(rows, i) for i in range(sizes.warm + sizes.steps)]
        times = self._times(steps)
        if variant:  # the engine's own again
            runner.programs.clear()
            runner.programs.update(forwards)
            runner.samplers.plain = samplers
        context = sizes.context + sizes.warm + sizes.steps // 2
        beside = self._beside(roofline.step_rows(rows, context), times["ms"])
        return {**times, "tokens_per_s": 1e3 * rows / times["ms"], **beside, **found}

    def prefill(self, tokens: int) -> Mapping[str, Any]:
        """One prompt of `tokens` tokens in one step."""
        found = self._compile(self.runner.buckets.pick(1, tokens))
        pages = list(range(1, 1 + -(-tokens // self.options.block_size)))
        request = self._request("prefill", tokens, pages)
        step = Step([request], [0], [0], [tokens], [True], total_tokens=tokens)
        first = Step([request], [0], [0], [tokens], [True], [Admission(0, request, pages)], total_tokens=tokens)
        times = self._times([first, *[step] * (self.sizes.warm + 5)])
        beside = self._beside(roofline.step_rows(0, 0, tokens), times["ms"])
        return {**times, "tokens_per_s": 1e3 * tokens / times["ms"], **beside, **found}

    def engine(self) -> Mapping[str, Any]:
        """Requests from their prompts to their last tokens, through scheduler and runner."""
        sizes, options = self.sizes, self.options
        assert options.max_num_seqs and options.max_num_batched_tokens and options.max_model_len
        scheduler = Scheduler(
            BlockManager(self.runner.num_pages - 1, options.block_size, enable_prefix_caching=True),
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
        )
        engine = Engine(scheduler, self.runner, options, vocab_size=self.config.vocab_size)
        before = self.runner.num_programs
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=sizes.output)
        for i in range(sizes.requests):
            engine.add_request(engine.make_request(str(i), self._prompt(sizes.context, seed=i), params))
        start = time.perf_counter()
        tokens, first, walls = 0, None, []
        while engine.has_work:
            begin = time.perf_counter()
            made = sum(len(update.new_token_ids) for update in engine.step())
            if made and first is None:
                first = time.perf_counter() - start
            if made == sizes.requests:
                walls.append(time.perf_counter() - begin)
            tokens += made
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "output_tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "first_token_s": first,
            "ms": 1e3 * statistics.median(walls) if walls else None,
            "compiled": self.runner.num_programs - before,
        }

    def _beside(self, rows: list[tuple[int, int]], ms: float) -> dict[str, Any]:
        """What the roofline says of a step, with the rates that this device was measured to have.

        Returns:
          `predicted_ms`, and `ratio` of the measured `ms` to it; `floor_ms`, of which `share` was reached; `bytes` and
          `flops`. Without measured rates nothing.
        """
        copy, matmul = self._context.fact("copy", "bytes_per_s"), self._context.fact("matmul", "flops_per_s")
        if not copy or not matmul:
            return {"floor_ms": None}
        of_cache = self.options.kv_cache_dtype, self.options.block_size
        step = work.Work(self.config, self.params, tuple(rows), "bfloat16", *of_cache)
        found = roofline.predict(step, roofline.Ceilings(copy, matmul, matmul, 0, "measured"))
        return {
            "predicted_ms": found["ms"],
            "ratio": ms / found["ms"],
            "share": found["floor_ms"] / ms,
            **{name: found[name] for name in ("floor_ms", "bytes", "flops")},
        }

    def _times(self, steps: list[Step]) -> dict[str, Any]:
        """Milliseconds of a step, and of its launch on the host: medians, the first steps left out."""
        walls, hosts, tokens = [], [], []
        previous = None
        last = time.perf_counter()
        for step in steps:
            begin = time.perf_counter()
            launched = self.runner.launch(step)
            hosts.append(time.perf_counter() - begin)
            if previous:
                tokens += self.runner.collect(previous).token_ids
                now = time.perf_counter()
                walls.append(now - last)
                last = now
            previous = launched
        if previous:
            tokens += self.runner.collect(previous).token_ids
        warm = self.sizes.warm
        return {
            "ms": 1e3 * statistics.median(walls[warm:]),
            "launch_ms": 1e3 * statistics.median(hosts[warm:]),
            "finite": all(row[0] >= 0 for row in tokens),
        }

    def _compile(self, bucket: Bucket, variant: str = "") -> dict[str, Any]:
        """Compiles a bucket's forward pass and its sampling, and puts them where the runner finds them.

        Returns:
          What they take and launch; that of sampling as `sample_...`.
        """
        runner = self.runner
        if bucket in runner.programs and not variant:
            return {}
        results = runner.buckets.result_sizes(bucket)
        num_rows = results.logits
        forward = make_forward(runner.module, runner.step_options, bucket, results)
        sample = make_sample_plain(runner.step_options)  # all requests are greedy
        sizes = forward_arguments(runner.params, runner.kv_pages, runner.slots, bucket, self.options.block_size)
        logits = sample_plain_arguments(runner.slots, num_rows, self.config.vocab_size)
        start = time.perf_counter()
        name = f"step-{bucket.tokens}-{bucket.rows}-{variant.replace(' ', '-')}"
        runner.programs[bucket], found = self._compiled(forward, FORWARD_DONATED, sizes, name, variant)
        runner.samplers.plain[num_rows], of_sample = self._compiled(sample, SAMPLE_DONATED, logits, name, variant)
        self.compile_seconds = time.perf_counter() - start
        sampling = {f"sample_{key}": value for key, value in of_sample.items()}
        return {"compile_s": self.compile_seconds, **found, **sampling}

    def _compiled(
        self,
        function: Callable[..., Any],
        donated: tuple[int, ...],
        arguments: tuple[Any, ...],
        name: str,
        variant: str,
    ) -> tuple[jax.stages.Compiled, dict[str, Any]]:
        """A program, and what it takes and launches."""
        folder, on_gpu = self._context.scratch / name, platform() == "gpu"
        options = compiler_options(jax.default_backend()) | VARIANTS.get(variant, {})
        options = {key: value for key, value in options.items() if value is not None}
        if on_gpu:
            options |= launches.dump_options(folder, function)
        compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile(options)
        analysis = compiled.memory_analysis()
        found = {"temp_bytes": analysis.temp_size_in_bytes if analysis else None}
        return compiled, found | (launches.count(folder, function) if on_gpu else {})

    def _decode_step(self, rows: int, index: int) -> Step:
        """Step `index` of `rows` requests; the first tells the device what they are."""
        if index == 0:
            self._requests = []
            for row in range(rows):
                pages = list(range(1 + row * self._pages_each, 1 + (row + 1) * self._pages_each))
                self._requests.append(self._request(f"decode {row}", self.sizes.context + 1, pages))
        admissions = [Admission(row, r, r.block_ids) for row, r in enumerate(self._requests)] if index == 0 else []
        return Step(
            list(self._requests),
            list(range(rows)),
            [self.sizes.context + index] * rows,
            [1] * rows,
            [True] * rows,
            admissions,
            total_tokens=rows,
        )

    def _request(self, name: str, tokens: int, pages: list[int]) -> Request:
        assert self.options.max_model_len
        request = Request(name, self._prompt(tokens, seed=len(name)), GREEDY, max_model_len=self.options.max_model_len)
        request.block_ids = pages
        return request

    def _prompt(self, tokens: int, seed: int) -> list[int]:
        return [(7919 * (i + 1) + 104729 * seed) % (self.config.vocab_size - 1) for i in range(tokens)]


def host(rows: int, context: Context) -> Mapping[str, Any]:
    """Host time of a step, without the launch."""
    from benchmarks import host_overhead  # with the engine's outer half, for which stand-ins do not do

    return host_overhead.measure(rows, 20 if context.tiny else 200, churn=False)
