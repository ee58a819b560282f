"""Flags of vLLM that are known here and not had: what to do instead, and the values that ask for nothing."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, NamedTuple

ALONE = ""  # the flag without a value


class VllmFlag(NamedTuple):
    """Attributes:
    advice: why it is not here and what to do; "" if it always asks for what is so anyway.
    neutral: values with which it asks for nothing, and is accepted.
    """

    advice: str
    neutral: tuple[str, ...] = ()


_SO_ANYWAY = VllmFlag("", (ALONE,))
_LORA = VllmFlag("LoRA adapters are not built yet: merge the adapter into the weights")
_LOCAL = VllmFlag("data parallelism is on one machine: --data-parallel-size says how many engines")
_REVISION = VllmFlag("not built: fetch it with `hf download NAME --revision REVISION` and give the folder as MODEL")
_CONFIG = VllmFlag("the model's own config.json is read: change it in a local folder and give that as MODEL")
_TEXT_ONLY = VllmFlag("models of text only are served")
_COMPILED = VllmFlag("XLA compiles every step before the first request: there is nothing to choose")
_ONE_MACHINE = VllmFlag("an engine is one process on one machine")
_H11 = VllmFlag("a head may have 64 KiB and 256 fields; see --max-body-bytes")
_POOLING = VllmFlag("a server of any model answers /v1/embeddings too; a request says how", ("auto", "generate"))

VLLM_FLAGS: dict[str, VllmFlag] = {
    # The model
    "--trust-remote-code": VllmFlag("code from a model's repository is never run, and no supported model needs it"),
    "--quantization": VllmFlag("weights are used as they are stored: for quantized ones give a .gguf file as MODEL"),
    "--revision": _REVISION,
    "--code-revision": VllmFlag("code from a model's repository is never run"),
    "--tokenizer-revision": _REVISION,
    "--tokenizer-mode": VllmFlag("the model's tokenizer.json or tokenizer.model is read", ("auto", "slow", "hf")),
    "--skip-tokenizer-init": VllmFlag("the server needs the tokenizer"),
    "--download-dir": VllmFlag("set HF_HOME in the environment"),
    "--hf-token": VllmFlag("set HF_TOKEN in the environment"),
    "--hf-overrides": _CONFIG,
    "--hf-config-path": _CONFIG,
    "--rope-scaling": _CONFIG,
    "--rope-theta": _CONFIG,
    "--config-format": VllmFlag("config.json or GGUF metadata is read", ("auto", "hf")),
    "--model-impl": VllmFlag("models are JAX modules", ("auto",)),
    "--model-loader-extra-config": VllmFlag("safetensors and GGUF are read as they are"),
    "--runner": _POOLING,
    "--task": _POOLING,
    "--convert": VllmFlag("a server of any model answers /v1/embeddings too", ("auto", "none")),
    "--pooler-config": VllmFlag("requests to /v1/embeddings say how to pool"),
    "--override-pooler-config": VllmFlag("requests to /v1/embeddings say how to pool"),
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--allowed-local-media-path": _TEXT_ONLY,
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--max-cpu-loras": _LORA,
    "--fully-sharded-loras": _LORA,
    "--ignore-patterns": VllmFlag("of a repository only what is read is fetched"),
    "--safetensors-load-strategy": VllmFlag("safetensors are mapped into memory"),
    "--max-parallel-loading-workers": VllmFlag("weights are read as fast as the disk gives them"),
    "--enable-prompt-embeds": VllmFlag("prompts are text or token ids"),
    "--disable-sliding-window": _CONFIG,
    # Devices
    "--pipeline-parallel-size": VllmFlag("pipeline parallelism is not built; --data-parallel-size is", ("1",)),
    "--decode-context-parallel-size": VllmFlag("context parallelism is not built", ("1",)),
    "--enable-expert-parallel": VllmFlag("expert parallelism is not built"),
    "--distributed-executor-backend": VllmFlag("each engine is one process", ("mp", "uni")),
    "--device": VllmFlag("set JAX_PLATFORMS in the environment: cpu, cuda or tpu", ("auto",)),
    "--data-parallel-size-local": _LOCAL,
    "--data-parallel-address": _LOCAL,
    "--data-parallel-rpc-port": _LOCAL,
    "--data-parallel-rank": _LOCAL,
    "--data-parallel-backend": VllmFlag(_LOCAL.advice, ("mp",)),
    "--headless": _LOCAL,
    "--nnodes": VllmFlag(_ONE_MACHINE.advice, ("1",)),
    "--node-rank": VllmFlag(_ONE_MACHINE.advice, ("0",)),
    "--master-addr": _ONE_MACHINE,
    "--master-port": _ONE_MACHINE,
    "--worker-cls": _ONE_MACHINE,
    "--api-server-count": VllmFlag("one process answers HTTP", ("1",)),
    "--disable-custom-all-reduce": _SO_ANYWAY,
    # The engine
    "--enforce-eager": VllmFlag("XLA compiles every step; --no-warmup starts sooner and compiles while serving"),
    "--compilation-config": _COMPILED,
    "-O": _COMPILED,
    "--optimization-level": _COMPILED,
    "--performance-mode": _COMPILED,
    "--cudagraph-capture-sizes": _COMPILED,
    "--max-seq-len-to-capture": _COMPILED,
    "--attention-backend": VllmFlag("use --attention-implementation"),
    "--speculative-config": VllmFlag("speculative decoding is not built yet"),
    "--kv-transfer-config": VllmFlag("prefill and decode are not split between servers here"),
    "--kv-events-config": VllmFlag("cache events are not published; /metrics has the hit rate"),
    "--cpu-offload-gb": VllmFlag("weights stay on the device; --swap-space keeps blocks on the host", ("0", "0.0")),
    "--kv-offloading-size": VllmFlag("use --swap-space"),
    "--disable-hybrid-kv-cache-manager": VllmFlag("there is one kind of cache for each model"),
    "--preemption-mode": VllmFlag("--swap-space swaps, without it blocks are computed again", ("recompute",)),
    "--calculate-kv-scales": VllmFlag("the KV cache is not quantized"),
    "--prefix-caching-hash-algo": VllmFlag("blocks are named by SHA-256", ("sha256",)),
    "--enable-chunked-prefill": _SO_ANYWAY,
    "--no-enable-chunked-prefill": VllmFlag("prompts are always computed in chunks: see --max-num-batched-tokens"),
    "--max-num-partial-prefills": VllmFlag("as many prompts as fit --max-num-batched-tokens share a step"),
    "--long-prefill-token-threshold": VllmFlag("see --max-num-batched-tokens", ("0",)),
    "--num-scheduler-steps": VllmFlag("a step gives each request one token; --overlap hides the host's work", ("1",)),
    "--async-scheduling": _SO_ANYWAY,
    "--no-async-scheduling": VllmFlag("use --no-overlap"),
    "--use-v2-block-manager": _SO_ANYWAY,
    "--disable-cascade-attn": _SO_ANYWAY,
    "--scheduler-cls": VllmFlag("jaxpaged.generate() takes a scheduling_key"),
    "--stream-interval": VllmFlag("each step's tokens are sent at once", ("1",)),
    "--enable-sleep-mode": VllmFlag("sleeping is not built"),
    "--guided-decoding-backend": VllmFlag("structured outputs use llguidance", ("auto", "guidance")),
    "--structured-outputs-config": VllmFlag("structured outputs use llguidance"),
    # The server
    "--tool-parser-plugin": VllmFlag("parsers are those of --tool-call-parser"),
    "--tool-server": VllmFlag("tools are run by the client"),
    "--reasoning-parser-plugin": VllmFlag("parsers are those of --reasoning-parser"),
    "--default-chat-template-kwargs": VllmFlag("set them in a template of your own: --chat-template FILE"),
    "--chat-template-content-format": VllmFlag("found out from the template", ("auto",)),
    "--response-role": VllmFlag("answers are the assistant's", ("assistant",)),
    "--return-tokens-as-token-ids": VllmFlag("a request asks for it with return_tokens_as_token_ids"),
    "--enable-prompt-tokens-details": _SO_ANYWAY,
    "--enable-request-id-headers": _SO_ANYWAY,
    "--enable-server-load-tracking": _SO_ANYWAY,
    "--enable-force-include-usage": VllmFlag("a request asks for it with stream_options"),
    "--disable-frontend-multiprocessing": VllmFlag("the engine is a process of its own"),
    "--middleware": VllmFlag("wrap the application in Python: server.app.create_app"),
    "--log-config-file": VllmFlag("use --log-level and --uvicorn-log-level"),
    "--max-log-len": VllmFlag("prompts are never logged"),
    "--enable-log-outputs": VllmFlag("outputs are never logged"),
    "--disable-access-log-for-endpoints": VllmFlag("use --disable-uvicorn-access-log"),
    "--collect-detailed-traces": VllmFlag("see --otlp-traces-endpoint and POST /start_profile"),
    "--show-hidden-metrics-for-version": VllmFlag("no metric is hidden"),
    "--enable-per-request-metrics": VllmFlag("see --enable-log-requests and --otlp-traces-endpoint"),
    "--enable-tokenizer-info-endpoint": VllmFlag("/tokenize and /detokenize tell what a tokenizer does"),
    "--enable-offline-docs": _SO_ANYWAY,
    "--h11-max-incomplete-event-size": _H11,
    "--h11-max-header-count": _H11,
    "--ssl-ciphers": VllmFlag("the ciphers are Python's own choice"),
    "--ssl-cert-reqs": VllmFlag("--ssl-ca-certs demands certificates of clients", ("0",)),
    "--enable-ssl-refresh": VllmFlag("restart the server when its certificate changes"),
    "--disable-log-requests": _SO_ANYWAY,
}
_SHORT = {"-q": "--quantization", "-pp": "--pipeline-parallel-size", "-cc": "--compilation-config"}


def add_vllm_flags(parser: argparse.ArgumentParser, own: Collection[str]) -> None:
    """Adds the flags, unseen in the help, but for those that the parser has itself."""
    for name, flag in {**VLLM_FLAGS, **{short: VLLM_FLAGS[long] for short, long in _SHORT.items()}}.items():
        if name not in own:
            nargs: Any = 0 if flag.neutral == (ALONE,) else 1 if flag.neutral else "*"
            parser.add_argument(
                name, action=_Known, nargs=nargs, dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip


def refusal(name: str, value: str = ALONE) -> str | None:
    """Why `--name value` cannot be had and what to do; None: it asks for nothing."""
    flag = VLLM_FLAGS[_SHORT.get(name, name)]
    return None if value in flag.neutral else f"{name} is vLLM's and not built here: {flag.advice}"


class _Known(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None) -> None:
        message = refusal(option_string or "", " ".join(values or []))
        if message is not None:
            parser.error(message)
