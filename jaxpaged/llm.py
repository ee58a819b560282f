"""Offline use: text or token ids in, text and token ids out, in the caller's process."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpaged.config import engine_config
from jaxpaged.core.pooling_params import PoolingKind, PoolingParams
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.checks import as_token_ids
from jaxpaged.engine.load import load_engine
from jaxpaged.engine.output import RequestOutput
from jaxpaged.engine.output_processor import OutputProcessor
from jaxpaged.errors import InvalidRequestError, ModelError, QueueFullError
from jaxpaged.progress import ProgressBars, progress_bar
from jaxpaged.text.bad_words import bad_word_ids
from jaxpaged.text.chat import render_chat
from jaxpaged.text.grammar import GrammarCompiler

Prompt = str | Sequence[int] | np.ndarray | jax.Array
Message = Mapping[str, Any]

_DECODE_SECONDS = 1.0  # nobody comes or reads along while it runs


def generate(
    model: str,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **engine_options: Any,
) -> list[RequestOutput]:
    """Loads `model`, continues `prompts`, and returns one output a prompt, in order.

    To call it more than once, keep an `LLM`: loading and compiling happen each time here.

    Args:
      model: "demo", a local folder, a `.gguf` file, or a Hugging Face name.
      prompts: text, token ids (a list, or an array of NumPy or JAX), or a list that may mix them.
      sampling_params: for all prompts, or one a prompt.
      engine_options: fields of `EngineConfig`.
    """
    return LLM(model, **engine_options).generate(prompts, sampling_params)


class LLM:
    """A model, ready to generate. Calls from several threads run one after the other.

    Attributes:
      engine: the engine that runs it.
      tokenizer: its tokenizer.
    """

    def __init__(self, model: str, *, use_tqdm: bool = True, **engine_options: Any):
        """Loads the model and compiles its programs.

        Args:
          model: as for `generate`.
          use_tqdm: show progress bars while loading and warming up.
          engine_options: fields of `EngineConfig`.
        """
        config = engine_config(model, **{"max_decode_seconds": _DECODE_SECONDS} | engine_options)
        with ProgressBars(config.compilation_cache_dir, enabled=use_tqdm) as bars:
            self.engine, self.tokenizer = load_engine(config, bars.update)
        self._grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size, self.engine.eos_token_ids)
        self._ids = itertools.count()
        self._lock = threading.Lock()  # the engine is driven by one thread at a time

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues the prompts and returns one output each, in order.

        Args:
          prompts, sampling_params: as for the function `generate`.
          cache_salt: shares cached prefixes only with prompts of the same salt; one, or one a prompt.
          priority: smaller goes first, under the "priority" policy; one, or one a prompt.

        Raises:
          InvalidRequestError: a prompt or its parameters are wrong; nothing has been started then.
        """
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else as_token_ids(p) for p in batch]
        return self._run(ids, texts, params, cache_salt, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template.

        Args:
          messages: dicts with `role` and `content`; or a list of such conversations.
          cache_salt, priority: as for `generate`.
          template_options: passed on to `render_chat`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidRequestError(f"messages={messages!r} is not a list of messages", param="messages")
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        ids = [render_chat(self.tokenizer, conversation, **template_options) for conversation in conversations]
        params = _as_params(sampling_params, len(ids))
        return self._run(ids, [None] * len(ids), params, cache_salt, priority, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: PoolingKind | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> np.ndarray:
        """The embeddings of the prompts: float32 `[number of prompts, dimensions]`, in order.

        They are made of hidden states after the final norm, by the same engine and in the same steps as text.

        Args:
          prompts, cache_salt, priority: as for `generate`.
          pooling: "last" takes the last prompt token's hidden state, "mean" the mean over the prompt. None: as the
            model's files say, else "last".
          dimensions: keep the first so many numbers, and then normalize. None: all.
          normalize: scale to unit L2 norm.

        Raises:
          InvalidRequestError: a prompt or an argument is wrong; nothing has been started then.
          UnsupportedError: the model's own way of pooling is wanted, and it is none that we have.
        """
        wanted = PoolingParams(pooling=pooling, dimensions=dimensions, normalize=normalize)
        batch = _as_batch(prompts)
        params = [SamplingParams(max_tokens=None, output_kind="final", detokenize=False)] * len(batch)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else as_token_ids(p) for p in batch]
        outputs = self._run(ids, [None] * len(ids), params, cache_salt, priority, use_tqdm, wanted)
        if not outputs:
            return np.zeros((0, dimensions or self.engine.hidden_size), np.float32)
        return np.stack([_vector(output) for output in outputs])

    @property
    def params(self) -> Any:
        """The model's weights, a pytree of arrays as the Flax module takes it."""
        return self.engine.runner.params

    def update_params(self, params: Any) -> None:
        """Takes other weights, of the shape of `params`, without copying or compiling; see `Engine.update_params`."""
        with self._lock:
            self.engine.update_params(params)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def _run(
        self,
        ids: list[list[int]],
        texts: list[str | None],
        params: list[SamplingParams],
        cache_salt: str | Sequence[str | None] | None,
        priority: int | Sequence[int],
        use_tqdm: bool,
        pooling: PoolingParams | None = None,
    ) -> list[RequestOutput]:
        salts, priorities = _each("cache_salt", cache_salt, len(ids)), _each("priority", priority, len(ids))
        requests = list(map(self._make_request, ids, params, salts, priorities, itertools.repeat(pooling)))
        with self._lock:
            return self._drive(requests, texts, use_tqdm)

    def _make_request(
        self,
        ids: list[int],
        params: SamplingParams,
        cache_salt: str | None,
        priority: int,
        pooling: PoolingParams | None,
    ) -> Request:
        wanted = params.structured_outputs
        return self.engine.make_request(
            f"{next(self._ids)}",
            ids,
            params,
            cache_salt=cache_salt,
            priority=priority,
            bad_word_ids=bad_word_ids(self.tokenizer, params.bad_words),
            grammar=self._grammars.compile(wanted, ignore_eos=params.ignore_eos) if wanted is not None else None,
            pooling=pooling,
        )

    def _drive(self, requests: list[Request], texts: list[str | None], use_tqdm: bool) -> list[RequestOutput]:
        processor = OutputProcessor(self.tokenizer)
        finished: dict[str, RequestOutput] = {}
        try:
            waiting = deque(zip(requests, texts, strict=True))
            embeds = bool(requests) and requests[0].pooling is not None
            what = "Embedding" if embeds else "Generating"
            with progress_bar(total=len(requests), desc=what, unit="req", disable=not use_tqdm) as bar:
                while len(finished) < len(requests):
                    self._add(waiting, processor)
                    outputs, stopped, _ = processor.process(self.engine.step())
                    for request_id, index in stopped:
                        self.engine.abort(request_id, index)
                    done = {output.request_id: output for output in outputs if output.finished}
                    finished |= done
                    bar.update(len(done))
        finally:  # an interrupted call must leave nothing behind in the engine
            for request in requests:
                if request.request_id not in finished:
                    self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()
        return [finished[request.request_id] for request in requests]

    def _add(self, waiting: deque[tuple[Request, str | None]], processor: OutputProcessor) -> None:
        """Hands the engine as many requests as its queue takes. An empty queue takes any, so all get in at last."""
        while waiting:
            request, text = waiting[0]
            try:
                self.engine.add_request(request)
            except QueueFullError:
                return
            processor.add(request, text)
            waiting.popleft()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):  # of NumPy or JAX
        array = np.asarray(prompts)
        return list(array) if array.ndim > 1 else [array]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"prompts={prompts!r} is neither text, token ids nor a list of these", param="prompt")
    batch = list(prompts)
    if batch and not any(isinstance(p, (str, Sequence)) or getattr(p, "ndim", 0) for p in batch):
        return [batch]  # one prompt of ids, right or wrong: the ids are checked later
    return batch


def _vector(output: RequestOutput) -> np.ndarray:
    """The embedding of an output. There is none if the hidden states are not finite."""
    if output.embedding is None:
        raise ModelError(f"no embedding could be made: {output.stop_reason}")
    return output.embedding


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, for outputs that come at the end."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [msgspec.structs.replace(params, output_kind="final")] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts", param="sampling_params")
    return [msgspec.structs.replace(p, output_kind="final") for p in params]


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value a prompt, from one for all or a list of them."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} values of {name} for {count} prompts", param=name)
    return list(value)
