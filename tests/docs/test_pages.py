"""docs/bmtrain.md and docs/model_center.md do what they say: a page's commands run in order, in a folder of its own."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bmburst.cli import CommandParser
from bmburst.cli.training import configure, resolve_options
from tests.docs.blocks import read_blocks
from tests.docs.scripts import Page, run_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bmtrain(run_page) -> Page:
    return run_page("bmtrain.md")


@pytest.fixture
def model_center(run_page) -> Page:
    assert find_spec("model_center") is not None, "model-center 1.0.2 is not installed: make install"
    return run_page("model_center.md")


def _losses(page: Page, what: str) -> list[float]:
    return [float(loss) for loss in re.findall(rf"^{what} \d: (\S+)$", page.printed, re.M)]


def _assert_learned(losses: list[float]) -> None:
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1


def test_a_split_bmtrain_program_prints_the_losses_of_a_whole_one(bmtrain: Page) -> None:
    _assert_learned(_losses(bmtrain, "plain"))
    assert _losses(bmtrain, "split") == pytest.approx(_losses(bmtrain, "plain"), abs=2e-4)  # 4 digits are shown


def test_a_wrapped_program_prints_the_same_on_one_and_two_ranks(bmtrain: Page) -> None:
    losses = _losses(bmtrain, "wrapped")
    _assert_learned(losses[:4])
    assert losses[4:] == pytest.approx(losses[:4], abs=2e-4)


def test_a_program_in_bmtrains_pipeline_prints_the_same_on_one_rank_and_in_stages(bmtrain: Page) -> None:
    losses = _losses(bmtrain, "stages")
    _assert_learned(losses[:4])
    assert losses[4:] == pytest.approx(losses[:4], abs=2e-4)


def test_model_centers_llama_prints_the_same_on_one_and_two_ranks(model_center: Page) -> None:
    one, two = _losses(model_center, "1 ranks, step"), _losses(model_center, "2 ranks, step")
    _assert_learned(one)
    assert two == pytest.approx(one, abs=2e-4)


def test_conversions_are_exact(model_center: Page) -> None:
    first, again, halves = (
        torch.load(model_center.folder / name / "pytorch_model.pt") for name in ("two", "again", "halves")
    )
    assert first.keys() == again.keys() == halves.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name].half(), halves[name]) for name in first)


def test_the_attention_block_equals_the_original_on_one_device(model_center: Page) -> None:
    assert "(1, 256, 64) on each of 2 ranks" in model_center.printed
    assert "equal" in run_script(model_center.folder, 2, [str(ROOT / "tests" / "docs" / "check_model_center.py")])


def test_the_training_command_takes_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = (block for block in read_blocks("model_center.md") if block.needs == "gpus")
    parser = CommandParser(prog="bmburst train", description="")
    configure(parser)
    monkeypatch.chdir(tmp_path)
    words = [word.replace("model_center_ext", str(ROOT / "model_center_ext")) for word in block.text.split()[2:]]
    config = resolve_options(parser.read(words))
    assert (config.model.num_kv_heads, config.dtype, config.sequence_length) == (8, "bfloat16", 8192)
