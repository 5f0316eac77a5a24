"""Files that a run reads: text, tokenizers and weights are looked at before ranks start."""

import dataclasses
import errno
import os
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bmburst.blocks.families import RopeScaling
from bmburst.blocks.presets import PRESETS
from bmburst.data import open_corpus
from bmburst.train.config import DataConfig, TrainConfig
from bmburst.train.resolve import check_paths, resolve, write_run_config
from tests import tiny
from tests.refusals import refusal_of, says
from tests.train.test_config_train import write


def hugging_face(folder, **changes):
    folder.mkdir()
    model = tiny.config(vocab_size=300, num_kv_heads=1, max_position_embeddings=512)
    write(folder / "config.json", model.to_hugging_face() | changes)
    save_file(tiny.weights(model), folder / "model.safetensors")
    return folder, model


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "folder"}, "folder | empty"),
        ({"source": "images"}, "no text | directory | .txt"),
        ({"tokenizer": "tokenizer.json"}, "tokenizer.json | no such file | allowed: "),
    ],
)
def test_data_that_is_missing_or_empty_is_refused(tmp_path, data, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "image.png").write_bytes(b"x")
    given = {name: str(tmp_path / file) for name, file in data.items()}
    says(refusal_of(check_paths, TrainConfig(data=DataConfig(**given))), words)
    (tmp_path / "text.txt").write_text("words")
    check_paths(TrainConfig(data=DataConfig(source=str(tmp_path / "text.txt"))))


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("words and more words")
    file = open_corpus(tmp_path / "text.txt", None, tmp_path)
    model = dataclasses.replace(PRESETS["llama-tiny"], vocab_size=256)
    config = TrainConfig(model=model, data=DataConfig(source=str(file.path)))
    says(refusal_of(check_paths, config), "token id 256 | vocab_size | at least 259")
    text = TrainConfig(model=model, data=DataConfig(source=str(tmp_path / "text.txt")))
    says(refusal_of(check_paths, text), "vocab_size 256 | at least 259")
    check_paths(TrainConfig(data=DataConfig(source=str(file.path))))
    # Weights that exist have their size: an option does not change it.
    named = partial(TrainConfig, model=model, data=DataConfig(tokenizer="bytes"))
    says(refusal_of(named), "vocab_size 256 | at least 259 | --model.vocab_size 259")
    told = says(refusal_of(named, init_from=tmp_path), "vocab_size 256 | at least 259 | resize_token_embeddings(259)")
    assert "--model.vocab_size" not in told


def test_a_sequence_beyond_the_model_names_the_longest_and_how_to_extend_it():
    model = tiny.config(max_position_embeddings=512)
    words = "sequence_length 1024 | --sequence-length 512 | --model.max_position_embeddings 1024 | rope_scaling"
    says(refusal_of(TrainConfig, model=model, sequence_length=1024), words)


@pytest.mark.parametrize("source", ["stdlib", "./stdlib"])
def test_a_token_file_called_as_the_standard_library(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words and more words")
    open_corpus("text.txt", "bytes", tmp_path).path.rename("stdlib")
    before = sorted(tmp_path.iterdir())
    check_paths(TrainConfig(data=DataConfig(source=source)))
    assert sorted(tmp_path.iterdir()) == before
    small = dataclasses.replace(PRESETS["llama-tiny"], vocab_size=256)
    text = refusal_of(check_paths, TrainConfig(model=small, data=DataConfig(source=source)))
    says(text, "'stdlib' | token id 256" if source == "./stdlib" else "model.vocab_size 256", "259")


def test_a_token_file_of_another_tokenizer_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("words and more words")
    vocabulary = {"[EOS]": 0, "words": 1, "and": 2, "more": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[EOS]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = open_corpus(tmp_path / "text.txt", "bytes", tmp_path)
    source = DataConfig(source=str(file.path), tokenizer=str(tmp_path / "tokenizer.json"))
    says(refusal_of(check_paths, TrainConfig(data=source)), "'bytes' | tokenizer.json | bmburst data --tokenizer")


def test_text_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("words")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, who may read everything, runs tests too
    says(refusal_of(check_paths, TrainConfig(data=DataConfig(source=str(text)))), "text.txt | read | fix: chmod +r")

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    says(refusal_of(check_paths, TrainConfig(data=DataConfig(source=str(text)))), "Permission denied")


def test_init_from_brings_its_model_and_takes_rope_scaling(tmp_path):
    folder, model = hugging_face(tmp_path / "hf")
    config = resolve((), {"init_from": str(folder), "sequence_length": "512"})
    assert (config.model, config.preset) == (model, None)
    check_paths(config)
    scaled = {
        "init_from": str(folder),
        "sequence_length": "2048",
        "model.max_position_embeddings": "2048",
        "model.rope_scaling.kind": "yarn",
        "model.rope_scaling.factor": "4",
        "model.rope_scaling.original_max_position_embeddings": "512",
    }
    config = resolve((), scaled)
    check_paths(config)
    assert config.model.rope_scaling is not None
    path = write_run_config(config, tmp_path / "run")
    assert resolve((path,)) == config
    values = model.to_hugging_face() | {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    for case, more in (
        ("weights without scaling", {"model.rope_scaling.kind": "dynamic", "model.rope_scaling.factor": "2"}),
        ("weights with dynamic scaling", {}),
    ):
        if not more:
            write(folder / "config.json", values)
        given = {name: each for name, each in scaled.items() if "rope_scaling" not in name} | more
        found = resolve((), given).model
        assert found.rope_scaling == RopeScaling(
            kind="dynamic", factor=2.0, original_max_position_embeddings=model.max_position_embeddings
        ), case
        assert found.max_position_embeddings == 2048


def test_text_is_read_with_the_tokenizer_of_the_model_that_a_run_starts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = hugging_face(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("words and more words")
    for source in ("text.txt", "stdlib"):
        given = {"init_from": str(folder), "sequence_length": "512", "data.source": source}
        assert resolve((), given).data.tokenizer is None  # that folder has none
    Tokenizer(WordLevel({"[EOS]": 0, "words": 1}, unk_token="[EOS]")).save(str(folder / "tokenizer.json"))
    for source in ("text.txt", "stdlib"):
        given = {"init_from": str(folder), "sequence_length": "512", "data.source": source}
        assert resolve((), given).data.tokenizer == str(folder)
        assert resolve((), given | {"data.tokenizer": "bytes"}).data.tokenizer == "bytes"
    assert resolve((), {"sequence_length": "512", "data.source": "text.txt"}).data.tokenizer is None
    file = open_corpus("text.txt", "bytes", tmp_path)
    given = {"init_from": str(folder), "sequence_length": "512", "data.source": str(file.path)}
    assert resolve((), given).data.tokenizer == str(folder)  # the file's own is refused, unless it is named
    assert resolve((), given | {"data.tokenizer": "bytes"}).data.tokenizer == "bytes"


def test_init_from_that_cannot_work_is_refused(tmp_path):
    folder, _ = hugging_face(tmp_path / "hf")
    options = {"init_from": str(folder), "sequence_length": "64"}
    says(refusal_of(resolve, (), options | {"preset": "llama-tiny"}), "'llama-tiny' | init_from | model | fix: ")
    says(refusal_of(resolve, (), {"init_from": str(tmp_path)}), "init_from | config.json | fix: ")
    (folder / "adapter_config.json").write_text("{}")  # transformers and bmburst eval would add it to the weights
    says(
        refusal_of(resolve, (), options), "init_from | a LoRA adapter, adapter_config.json | --lora.init_from | remove"
    )
    (folder / "adapter_config.json").unlink()
    config = resolve((), options | {"model.num_layers": "3"})
    says(refusal_of(check_paths, config), "model.num_layers 3 | 2 | fix: ")
    config = resolve((), options)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    says(refusal_of(check_paths, config), "model.safetensors | truncated | fix: ")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n")
    says(refusal_of(check_paths, config), "model.safetensors | Git LFS | fix: git lfs install && git lfs pull")
    (folder / "model.safetensors").unlink()
    says(refusal_of(check_paths, config), "no weights | model.safetensors")
    (config.init_from / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    says(refusal_of(check_paths, config), "model-Q4_K_M.gguf | GGUF is not read | model.safetensors | fix: ")
    gguf = config.init_from / "model-Q4_K_M.gguf"
    gguf.rename(config.init_from / "consolidated.safetensors")
    says(
        refusal_of(check_paths, config), "consolidated.safetensors | not read | model.safetensors | fix: | transformers"
    )
    gguf.write_bytes(b"GGUF")
    says(refusal_of(resolve, (), {"init_from": str(gguf)}), f"init_from {gguf} | is a file | fix: ")
    other, _ = hugging_face(tmp_path / "gemma", model_type="gemma")
    text = refusal_of(resolve, (), {"init_from": str(other)})
    says(text, other / "config.json", "model_type", "'gemma'", "allowed: model_type llama")
    (other / "config.json").write_text("{")
    says(refusal_of(resolve, (), {"init_from": str(other)}), "config.json | JSON | fix: ")
    (other / "config.json").write_text("[]")
    says(refusal_of(resolve, (), {"init_from": str(other)}), "config.json | JSON object | fix: ")
