"""Tensors that repeat others: a head beside a tied embedding, rotary frequencies. None is dropped unread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmburst.blocks.rope import rotary_frequencies
from bmburst.checkpoint import derived, hugging_face
from bmburst.checkpoint.adapter import open_merged
from bmburst.checkpoint.conversion import convert
from bmburst.checkpoint.derived import EMBEDDING, HEAD
from bmburst.inference.generator import Generator
from bmburst.train.resolve import read_hugging_face_config
from tests import tiny
from tests.checkpoint.loss_program import loss_of, write_loss
from tests.checkpoint.test_convert import edit, model_center_directory
from tests.distributed.programs import run_program
from tests.refusals import refused

NORM_FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
IDS = torch.arange(1, 12)[None]


def _change(folder: Path, change: Callable[[dict[str, Tensor]], object], **values: Any) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder, **values)
    return folder


def own_head(folder: Path, family: str = "llama") -> Path:
    """A directory whose config.json says that the head is tied, and whose files have another head."""
    edit(tiny.save(folder, family), tie_word_embeddings=True)
    return folder


def head_alone(folder: Path) -> Path:
    return _change(tiny.save(folder), lambda weights: weights.pop(EMBEDDING), tie_word_embeddings=True)


def _greedy(model: Any, new: int) -> list[int]:
    ids = IDS
    for _ in range(new):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("make", [own_head, head_alone])
def test_logits_and_tokens_are_those_of_transformers(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """transformers 5 keeps a head of its own, and takes a head alone for the embedding too."""
    folder = make(tmp_path / "model")
    wanted = tiny.load(folder)
    assert (wanted.lm_head.weight is wanted.model.embed_tokens.weight) == (make is head_alone)
    assert read_hugging_face_config(folder).tie_embeddings == (make is head_alone)
    (answer,) = Generator(folder, dtype="float32").generate([IDS[0].tolist()], max_new_tokens=8, eos_ids=(62,))
    assert list(answer.tokens) == _greedy(wanted, 8)
    for size in (1, 2):
        run_program(size, write_loss, folder, IDS, tmp_path / f"{size}")
        assert torch.load(tmp_path / f"{size}" / "loss") == pytest.approx(loss_of(wanted, IDS), rel=1e-6)
        _same_model(tmp_path / f"{size}", wanted)


def _same_model(folder: Path, wanted: Any) -> None:
    """The directory is the model in transformers, and its config.json says whether the head is tied."""
    found = tiny.load(folder)
    for name in (EMBEDDING, HEAD):
        assert torch.equal(found.get_parameter(name), wanted.get_parameter(name)), name
    tied = wanted.lm_head.weight is wanted.model.embed_tokens.weight
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == tied


@pytest.mark.parametrize("make", [own_head, head_alone])
@pytest.mark.parametrize("to", ["huggingface", "model-center"])
def test_conversions_keep_the_head(tmp_path: Path, make: Callable[[Path], Path], to: str) -> None:
    folder = make(tmp_path / "model")
    convert(folder, tmp_path / "there", to=to)
    if to == "model-center":
        convert(tmp_path / "there", tmp_path / "back", to="huggingface")
    _same_model(tmp_path / ("back" if to == "model-center" else "there"), tiny.load(folder))


def test_minicpm_is_tied_by_its_own_default(tmp_path: Path) -> None:
    folder = own_head(tmp_path / "model", "minicpm")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    convert(folder, tmp_path / "there", to="huggingface")
    there, here = (load_file(each / "model.safetensors")[HEAD] for each in (tmp_path / "there", folder))
    assert torch.equal(there, here)
    assert json.loads((tmp_path / "there" / "config.json").read_text())["tie_word_embeddings"] is False


def test_merging_an_adapter_keeps_the_head(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    folder = own_head(tmp_path / "base")
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(tiny.load(folder), settings).save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "adapter", tmp_path / "merged", to="huggingface", merge=True, base=folder)
    wanted = PeftModel.from_pretrained(tiny.load(folder), tmp_path / "adapter").merge_and_unload()
    _same_model(tmp_path / "merged", wanted)
    torch.testing.assert_close(tiny.load(tmp_path / "merged")(IDS).logits, wanted(IDS).logits, rtol=1e-5, atol=1e-6)
    assert not open_merged(tmp_path / "adapter", folder).config.tie_embeddings


def test_a_tied_model_whose_head_peft_has_trained(tmp_path: Path) -> None:
    """PEFT copies each of modules_to_save, so that two tied matrices differ: huggingface/transformers#45127."""
    from peft import LoraConfig, get_peft_model

    config = tiny.transformers_config(tie_word_embeddings=True)
    tiny.save(tmp_path / "base", config)
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(tiny.load(tmp_path / "base"), settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(tmp_path / "adapter")
    with refused(
        "adapter_config.json | modules_to_save | embedding is its head | fix: give the model | merge_and_unload"
    ):
        open_merged(tmp_path / "adapter", tmp_path / "base")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    edit(tmp_path / "merged", tie_word_embeddings=True)  # as transformers 4 wrote it
    wanted = tiny.load(tmp_path / "merged")
    assert wanted.config.tie_word_embeddings and wanted.lm_head.weight is not wanted.model.embed_tokens.weight
    convert(tmp_path / "merged", tmp_path / "there", to="huggingface", dtype="float32")
    _same_model(tmp_path / "there", wanted)


def test_the_last_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are compared to their end, piece by piece, and across dtypes."""
    monkeypatch.setattr(derived, "_PIECE", 7)

    def repeat(weights: dict[str, Tensor]) -> None:
        weights[HEAD] = weights[EMBEDDING].bfloat16()
        weights[EMBEDDING] = weights[HEAD].float()

    folder = _change(tiny.save(tmp_path / "model"), repeat, tie_word_embeddings=True)
    assert hugging_face.read_config(folder).tie_embeddings
    assert HEAD not in hugging_face.open_weights(folder).places
    _change(folder, lambda weights: weights[EMBEDDING][-1, -1].add_(1e-6))
    assert not hugging_face.read_config(folder).tie_embeddings


def test_what_cannot_be_is_refused_with_both_names(tmp_path: Path) -> None:
    def more_rows(weights: dict[str, Tensor]) -> None:
        weights[HEAD] = torch.zeros(63, 24)

    config = tiny.config(tie_embeddings=True, norm_eps=1e-6)
    with refused(HEAD, EMBEDDING, "tie_embeddings to False"):
        hugging_face.check_weights(own_head(tmp_path / "own"), config)
    folder = _change(tiny.save(tmp_path / "model"), more_rows, tie_word_embeddings=True)
    with refused(HEAD, EMBEDDING, "[63, 24]", "[61, 24]", "tie_word_embeddings"):
        hugging_face.read_config(folder)
    values = {"vocab_size": 61, "dim_model": 24, "num_heads": 4, "dim_head": 6, "dim_ff": 40, "num_layers": 2}
    untied = tiny.config(num_kv_heads=4)
    theirs = model_center_directory(tmp_path / "theirs", untied, values | {"tied": True, "norm_eps": 1e-5})
    with refused("output_projection.weight", "input_embedding.weight", "tied"):
        hugging_face.open_weights(theirs)


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    """An index without a head says that a tied head is the embedding, although its files are not there."""
    folder = tiny.save(tmp_path / "model", tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    assert read_hugging_face_config(folder).tie_embeddings
    index = {"weight_map": {EMBEDDING: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_hugging_face_config(folder).tie_embeddings


def test_one_name_in_two_files(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "a.safetensors")
    save_file({HEAD: weights[HEAD]}, folder / "b.safetensors")
    where = dict.fromkeys(weights, "a.safetensors") | {HEAD: "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert hugging_face.open_weights(folder)
    save_file({HEAD: weights[HEAD] + 1}, folder / "b.safetensors")
    with refused(HEAD, "a.safetensors", "b.safetensors"):
        hugging_face.open_weights(folder)


def test_rotary_frequencies_in_files(tmp_path: Path) -> None:
    """They are what the configuration says, rounded as old exports have them; others are refused by name."""
    folder = tiny.save(tmp_path / "model")
    frequencies, _ = rotary_frequencies(tiny.config(), None)
    for stored in (frequencies, frequencies.half(), frequencies.bfloat16()):
        _change(folder, lambda weights, stored=stored: weights.update({NORM_FREQUENCIES: stored}))
        assert hugging_face.open_weights(folder)
    for other in (frequencies / 4, frequencies[:-1]):
        _change(folder, lambda weights, other=other: weights.update({NORM_FREQUENCIES: other}))
        with refused(NORM_FREQUENCIES, "rope_theta 10000"):
            hugging_face.open_weights(folder)
    edit(folder, rope_scaling={"rope_type": "linear", "factor": 4.0})
    _change(folder, lambda weights: weights.update({NORM_FREQUENCIES: frequencies / 4}))
    assert hugging_face.open_weights(folder)
