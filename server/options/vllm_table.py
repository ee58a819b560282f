"""The flags of `vllm serve` that are not had here, by what becomes of them.

Behind a name "=" means that it takes a value, "=+" several.
"""

from __future__ import annotations

# Asked for or not, it is so: nothing is said.
SO_ANYWAY = """
    --enable-chunked-prefill --async-scheduling --use-v2-block-manager --disable-cascade-attn
    --disable-custom-all-reduce --enable-prompt-tokens-details --enable-request-id-headers
    --enable-server-load-tracking --enable-offline-docs --disable-log-requests --use-tqdm-on-load
"""

# Some of these ask for the opposite of a flag of ours: its argument, what that becomes, and how it is given.
CONTRADICTS = {
    "--disable-log-requests": ("ServerConfig.enable_log_requests", True, "--enable-log-requests"),
    "--async-scheduling": ("EngineConfig.overlap", False, "--no-overlap"),
    "--enable-offline-docs": ("ServerConfig.disable_fastapi_docs", True, "--disable-fastapi-docs"),
}

# Values of vLLM's, of flags that we have, and not with these.
VALUES = {
    "kv_cache_dtype": "fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4",
    "load_format": "pt npcache tensorizer runai_streamer runai_streamer_sharded bitsandbytes gguf sharded_state "
    "mistral fastsafetensors",
    "tool_call_parser": "deepseek_v32 ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc "
    "granite4 hunyuan_a13b internlm jamba kimi_k2 longcat minimax minimax_m2 olmo3 openai phi4_mini_json qwen3_coder "
    "qwen3_xml seed_oss step3 step3p5 xlam",
    "reasoning_parser": "deepseek_v3 ernie45 gemma4 glm45 openai_gptoss granite holo2 hunyuan_a13b kimi_k2 minimax_m2 "
    "minimax_m2_append_think mistral nemotron_v3 olmo3 seed_oss step3 step3p5",
}

# They would make no difference to answers or to who is served: a warning, and on. (why, names)
IGNORED = (
    ("code from a model's repository is never run, and no supported model needs it", "--trust-remote-code"),
    ("XLA compiles every step; --no-warmup starts sooner and compiles while serving", "--enforce-eager"),
    (
        "XLA compiles every step before the first request: there is nothing to choose",
        "--compilation-config= -cc= -O= --optimization-level= --performance-mode= --cudagraph-capture-sizes=+ "
        "--max-cudagraph-capture-size= --max-seq-len-to-capture= --cudagraph-metrics --jit-monitor-mode= "
        "--jit-monitor-verbose --ir-op-priority= --kernel-config= -ac= --attention-config= "
        "--enable-flashinfer-autotune --linear-backend= --sparse-indexer-topk-backend= --enable-cumem-allocator",
    ),
    (
        "models of text only are served",
        "--limit-mm-per-prompt= --mm-processor-kwargs= --mm-processor-cache-gb= --mm-processor-cache-type= "
        "--mm-processor-device= --mm-shm-cache-max-object-size-mb= --mm-tensor-ipc= --mm-ipc-gpu-memory-gb= "
        "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-margin= --mm-encoder-fp8-scale-save-path= --mm-encoder-tp-mode= "
        "--mm-hasher-algorithm= --mm-device-do-normalize --media-io-kwargs= --allowed-local-media-path= "
        "--allowed-media-domains=+ --video-pruning-method= --video-pruning-rate= --interleave-mm-strings "
        "--skip-mm-profiling --language-model-only --disable-chunked-mm-input --trust-request-mm-kwargs "
        "--enable-shm-tensor-arena --enable-flash-late-interaction",
    ),
    (
        "no model of that kind is served",
        "--mamba-backend= --mamba-block-size= --mamba-cache-dtype= --mamba-cache-mode= --mamba-cache-philox-rounds= "
        "--mamba-ssm-cache-dtype= --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding "
        "--enable-mamba-shared-prefix-checkpoint --gdn-prefill-backend= --kda-decode-backend= --kda-prefill-backend= "
        "--use-replayssm --replayssm-buffer-len= --moe-backend= --all2all-backend= --expert-placement-strategy= "
        "--enable-eplb --eplb-config= --enable-ep-weight-filter --diffusion-config= --engram-config= "
        "--swa-bounded-replay --enable-hc-sp",
    ),
    (
        "an engine is one process on one machine",
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --disable-nccl-for-dp-synchronization "
        "--dp-sync-interval= --enable-nccl-comm-suspend --ray-workers-use-nsight --enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --ubatch-size= --dcp-comm-backend= "
        "--dcp-kv-cache-interleave-size= --dcp-q-replicate --cp-kv-cache-interleave-size= "
        "--max-parallel-loading-workers= --numa-bind --numa-bind-cpus=+ --numa-bind-nodes=+ --renderer-num-workers= "
        "--enable-batch-sharded-sampling",
    ),
    (
        "weights are read as fast as the disk gives them, and only what is read is fetched",
        "--safetensors-load-strategy= --safetensors-prefetch-block-size= --safetensors-prefetch-num-threads= "
        "--pt-load-map-location= --ignore-patterns=+ --model-loader-extra-config=",
    ),
    ("prompts and outputs are never logged", "--max-log-len= --enable-log-deltas"),
    (
        "see --enable-log-requests, --otlp-traces-endpoint and /metrics",
        "--aggregate-engine-logging --enable-logging-iteration-details --enable-mfu-metrics --kv-cache-metrics "
        "--kv-cache-metrics-sample= --log-error-stack --logging-config= --enable-layerwise-nvtx-tracing "
        "--per-request-spec-decode-metrics= --custom-histogram-buckets=+ --collect-detailed-traces= "
        "--show-hidden-metrics-for-version= --enable-per-request-metrics --disable-access-log-for-endpoints= "
        "--enable-trace-replay --fail-on-environ-validation",
    ),
    (
        "steps are made of whatever fits --max-num-batched-tokens",
        "--max-num-partial-prefills= --long-prefill-token-threshold-adaptive --max-num-scheduled-tokens= "
        "--prefill-schedule-interval= --scheduler-reserve-full-isl --watermark=",
    ),
    ("blocks are cached until the room is needed", "--prefix-cache-retention-interval= --prefix-match-unit="),
    ("there is one kind of cache for each model", "--disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill"),
    ("a head may have 64 KiB and 256 fields", "--h11-max-incomplete-event-size= --h11-max-header-count="),
)

_LOCAL = "data parallelism is on one machine: --data-parallel-size says how many engines"
_REVISION = "not built: fetch it with `hf download NAME --revision REVISION` and give the folder as MODEL"
_CONFIG = "the model's own config.json is read: change it in a local folder and give that as MODEL"
_EMBEDDINGS = "a server of any model answers /v1/embeddings too; a request says how"

# They would change answers, or who is served and how: an error. (what to do instead, names)
REFUSED = (
    (
        "weights are used as they are stored: for quantized ones give a .gguf file as MODEL",
        "--quantization= -q= --quantization-config= --allow-deprecated-quantization",
    ),
    (_REVISION, "--revision= --tokenizer-revision="),
    ("code from a model's repository is never run", "--code-revision="),
    ("the model's tokenizer.json or tokenizer.model is read", "--tokenizer-mode="),
    ("the server needs the tokenizer", "--skip-tokenizer-init --tokens-only"),
    ("set HF_HOME in the environment", "--download-dir="),
    ("set HF_TOKEN in the environment", "--hf-token="),
    (
        _CONFIG,
        "--hf-overrides= --hf-config-path= --rope-scaling= --rope-theta= --disable-sliding-window "
        "--model-class-overrides=",
    ),
    ("config.json or GGUF metadata is read", "--config-format="),
    ("models are JAX modules", "--model-impl="),
    (_EMBEDDINGS, "--runner= --task= --convert= --pooler-config= --override-pooler-config="),
    (
        "LoRA adapters are not built yet: merge the adapter into the weights",
        "--enable-lora --lora-modules= --max-loras= --max-lora-rank= --max-cpu-loras= --fully-sharded-loras "
        "--lora-dtype= --lora-target-modules= --max-lora-cls-labels= --default-mm-loras= --specialize-active-lora "
        "--enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-tower-connector-lora",
    ),
    (
        "prompts are text or token ids",
        "--enable-prompt-embeds --enable-mm-embeds --mm-encoder-only --io-processor-plugin=",
    ),
    ("pipeline parallelism is not built; --data-parallel-size is", "--pipeline-parallel-size= -pp="),
    (
        "context parallelism is not built",
        "--decode-context-parallel-size= -dcp= --prefill-context-parallel-size= -pcp=",
    ),
    (
        "expert parallelism is not built",
        "--enable-expert-parallel -ep --enable-elastic-ep --elastic-ep-max-dp-size= --enable-scale-out "
        "--enable-return-routed-experts",
    ),
    ("each engine is one process", "--distributed-executor-backend="),
    ("set JAX_PLATFORMS in the environment: cpu, cuda or tpu", "--device="),
    ("set CUDA_VISIBLE_DEVICES or JAX_PLATFORMS in the environment", "--device-ids="),
    (
        _LOCAL,
        "--data-parallel-size-local= -dpl= --data-parallel-address= -dpa= --data-parallel-rpc-port= -dpp= "
        "--data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= --data-parallel-backend= -dpb= --headless "
        "--data-parallel-external-lb -dpe --data-parallel-hybrid-lb -dph --data-parallel-multi-port-external-lb -dpm "
        "--data-parallel-supervisor-port= --dp-supervisor-probe-failure-threshold= "
        "--dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= --enable-fault-tolerance "
        "--fault-tolerance-config=",
    ),
    (
        "an engine is one process on one machine",
        "--nnodes= -n= --node-rank= -r= --master-addr= --master-port= --worker-cls= --worker-extension-cls=",
    ),
    ("one process answers HTTP", "--api-server-count= -asc="),
    ("use --attention-implementation", "--attention-backend="),
    ("use --gpu-memory-utilization", "--device-memory-utilization="),
    (
        "speculative decoding is not built yet",
        "--speculative-config= -sc= --spec-method= --spec-model= --spec-tokens= --num-speculative-tokens=",
    ),
    (
        "prefill and decode are not split between servers here",
        "--kv-transfer-config= --ec-transfer-config= --ec-manager-config=",
    ),
    ("cache events are not published; /metrics has the hit rate", "--kv-events-config="),
    (
        "weights stay on the device; --swap-space keeps blocks on the host",
        "--cpu-offload-gb= --cpu-offload-params= --offload-backend= --offload-group-size= --offload-num-in-group= "
        "--offload-params= --offload-prefetch-step=",
    ),
    ("use --swap-space", "--kv-offloading-size= --kv-offloading-backend="),
    ("--swap-space swaps, without it blocks are computed again", "--preemption-mode="),
    ("the KV cache is not quantized", "--calculate-kv-scales --kv-cache-dtype-skip-layers="),
    ("blocks are named by SHA-256", "--prefix-caching-hash-algo="),
    ("prompts are always computed in chunks: see --max-num-batched-tokens", "--no-enable-chunked-prefill"),
    ("see --max-num-batched-tokens", "--long-prefill-token-threshold="),
    ("use --no-overlap", "--no-async-scheduling"),
    ("jaxpaged.generate() takes a scheduling_key", "--scheduler-cls="),
    ("see --max-num-seqs and --max-num-queued-requests", "--max-num-active-seqs= --max-num-queued-tokens="),
    ("each step's tokens are sent at once", "--stream-interval="),
    (
        "sleeping is not built",
        "--enable-sleep-mode --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names= "
        "--weight-transfer-config=",
    ),
    ("structured outputs use llguidance", "--guided-decoding-backend= --structured-outputs-config="),
    ("parsers are those of --tool-call-parser", "--tool-parser-plugin= --tool-strict-level="),
    ("tools are run by the client", "--tool-server="),
    (
        "parsers are those of --reasoning-parser",
        "--reasoning-parser-plugin= --reasoning-config= --cohere-format= --cohere-is-reasoning-model "
        "--anthropic-disabled-thinking-effort=",
    ),
    (
        "set them in a template of your own: --chat-template FILE",
        "--default-chat-template-kwargs= -dc=",
    ),
    ("found out from the template", "--chat-template-content-format="),
    ("answers are the assistant's", "--response-role="),
    ("a request asks for it with return_tokens_as_token_ids", "--return-tokens-as-token-ids"),
    ("a request asks for it with stream_options", "--enable-force-include-usage"),
    ("the engine is a process of its own", "--disable-frontend-multiprocessing"),
    ("wrap the application in Python: server.app.create_app", "--middleware="),
    ("use --log-level and --uvicorn-log-level", "--log-config-file="),
    ("outputs are never logged", "--enable-log-outputs"),
    ("see --profiler-dir and POST /start_profile", "--profiler-config="),
    ("/tokenize and /detokenize tell what a tokenizer does", "--enable-tokenizer-info-endpoint"),
    ("the ciphers are Python's own choice", "--ssl-ciphers="),
    ("--ssl-ca-certs demands certificates of clients", "--ssl-cert-reqs="),
    ("restart the server when its certificate changes", "--enable-ssl-refresh"),
    ("HTTP is what is spoken", "--grpc --grpc-port="),
    (
        "it is not built",
        "--additional-config= --aux-output-config= --fingerprint-mode= --fingerprint-value= --watermark-config= "
        "--return-sampling-mask --use-fp64-gumbel --sse-keep-alive-interval=",
    ),
)

# Values with which a refused flag asks for nothing.
NEUTRAL = {
    "--tokenizer-mode": ("auto", "slow", "hf"),
    "--config-format": ("auto", "hf"),
    "--model-impl": ("auto",),
    "--runner": ("auto", "generate"),
    "--task": ("auto", "generate"),
    "--convert": ("auto", "none"),
    "--pipeline-parallel-size": ("1",),
    "-pp": ("1",),
    "--decode-context-parallel-size": ("1",),
    "-dcp": ("1",),
    "--prefill-context-parallel-size": ("1",),
    "-pcp": ("1",),
    "--distributed-executor-backend": ("mp", "uni"),
    "--device": ("auto",),
    "--data-parallel-backend": ("mp",),
    "-dpb": ("mp",),
    "--nnodes": ("1",),
    "-n": ("1",),
    "--node-rank": ("0",),
    "-r": ("0",),
    "--api-server-count": ("1",),
    "-asc": ("1",),
    "--cpu-offload-gb": ("0", "0.0"),
    "--kv-offloading-size": ("0",),
    "--preemption-mode": ("recompute",),
    "--prefix-caching-hash-algo": ("sha256",),
    "--long-prefill-token-threshold": ("0",),
    "--stream-interval": ("1",),
    "--guided-decoding-backend": ("auto", "guidance"),
    "--chat-template-content-format": ("auto",),
    "--response-role": ("assistant",),
    "--ssl-cert-reqs": ("0",),
}
