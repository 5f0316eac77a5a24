"""docs/families.md says what is: its tables are the code's, its commands are taken, and its conversions run."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks import families
from bmburst.blocks.families import FAMILIES, SCALES
from bmburst.blocks.presets import PRESETS
from bmburst.cli import CommandParser, main
from bmburst.cli.training import configure, resolve_options
from tests.checkpoint.test_convert import assert_same, weights_of
from tests.checkpoint.test_families import THERE, published
from tests.docs.blocks import read_blocks, text_of

ROOT = Path(__file__).parents[2]
PAGE = "families.md"
TEXT = text_of(PAGE)
COMMANDS = [shlex.split(command) for block in read_blocks(PAGE) for command in block.commands()]


def _row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_families_are_the_codes() -> None:
    rows = [_row(line) for line in TEXT.splitlines() if re.search(r"\| arXiv:\S+ \|$", line) and line.count("|") == 5]
    assert [row[0] for row in rows] == list(FAMILIES)
    for name, _, fields, _ in rows:
        family = FAMILIES[name]
        named = set(re.findall(r"`(\w+)`", fields))
        assert ("qkv_bias" in named, "qk_norm" in named) == (family.qkv_bias, family.qk_norm)
        assert ("sliding_window" in named) == (family.windows != "never")
        assert named.issuperset(SCALES) == family.scaled


def test_the_shapes_are_the_presets() -> None:
    rows = {row[0]: row[1:5] for line in TEXT.splitlines() if (row := _row(line))[0] in PRESETS}
    assert rows == {
        name: [
            f"{shape.num_parameters:,}",
            str(shape.num_layers),
            str(shape.hidden_size),
            f"{shape.num_heads}, {shape.num_kv_heads}",
        ]
        for name, shape in PRESETS.items()
    }


def test_the_exact_models_of_transformers_are_those_of_the_record() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("families_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert not [row["type"] for row in rows if row["result"] == "different"]
    exact = [row["type"] for row in rows if row["result"] == "exact"]
    _, _, section = TEXT.partition("\n## Models of transformers\n")
    listed = next(part for part in section.split("\n\n") if part.startswith(f"{exact[0]}, "))
    assert listed.replace("\n", " ").rstrip(".").split(", ") == exact
    assert f"{len(exact)} of {len(rows)} " in section
    assert f"{len(exact)} of {len(rows)} model types are exact" in " ".join((ROOT / "README.md").read_text().split())
    assert {"qwen2_moe", *FAMILIES} - {"minicpm"} <= {*exact}
    assert families.table({"rows": rows, "machine": {"ranks": 2}}) in path.with_suffix(".md").read_text()


def test_training_commands_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_center_ext").symlink_to(ROOT / "model_center_ext")
    parser = CommandParser(prog="bmburst train", description="")
    configure(parser)
    settled = [resolve_options(parser.read(words[2:])) for words in COMMANDS if words[:2] == ["bmburst", "train"]]
    scales = [config.model.scale_emb for config in settled]
    assert scales == [12, 12, 12, None]
    assert [config.model.num_layers for config in settled] == [40, 52, 40, 16]
    assert settled[3].model.qk_norm and settled[0].sequence_length == 131072


def _configuration(folder: Path) -> None:
    """What OpenBMB publishes beside the weights: it names neither the tied head nor the rotary base."""
    values = PRESETS["minicpm-2b"].to_hugging_face()
    for key in ("tie_word_embeddings", "rope_theta", "rope_parameters", "head_dim", "mlp_bias"):
        del values[key]
    (folder / "MiniCPM-2B-sft-bf16").mkdir()
    (folder / "MiniCPM-2B-sft-bf16" / "config.json").write_text(json.dumps(values))


def test_conversions_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = published(tmp_path / "MiniCPM-2B-sft-bf16", THERE["minicpm-2b"])
    done = [main(words[1:]) for words in COMMANDS if words[:2] == ["bmburst", "convert"]]
    assert done == [0, 0]
    assert_same(weights_of(tmp_path / "minicpm-hf"), weights_of(source))
    assert torch.load(tmp_path / "minicpm-mc" / "pytorch_model.pt", mmap=True).keys()
    assert (tmp_path / "minicpm-hf" / "modeling_minicpm.py").is_file()


def test_the_plan_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = (words for words in COMMANDS if words[:2] == ["bmburst", "plan"])
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.startswith("minicpm-2b, 128K tokens")


def test_every_command_is_looked_at() -> None:
    assert {" ".join(words[:2]) for words in COMMANDS} == {
        "bmburst plan",
        "bmburst train",
        "bmburst convert",
        "pip install",
    }
