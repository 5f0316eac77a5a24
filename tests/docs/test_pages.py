"""docs/bmtrain.md and docs/model_center.md do what they say: a page's commands run in order, in a folder of its own."""

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bmburst.cli import CommandParser, main
from bmburst.cli.train import configure, settle
from tests.docs.blocks import Block, read_blocks
from tests.docs.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGES = {name: read_blocks(ROOT / "docs" / name) for name in ("bmtrain.md", "model_center.md")}


class Page:
    """A page whose commands have run: its folder, and what they printed."""

    def __init__(self, blocks: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.printed = folder, ""
        for block in blocks:
            if block.file:
                (folder / block.file).write_text(block.text)
        monkeypatch.chdir(folder)
        for command in (command for block in blocks if _is_run(block) for command in block.commands()):
            self.run(shlex.split(command))

    def run(self, words: list[str]) -> None:
        """Run a command as the shell would, without starting Python anew."""
        if words[:2] != ["bmburst", "launch"]:
            assert words[0] == "bmburst" and main(words[1:]) == 0, words
            return
        assert main(["launch", "--dry-run", *words[2:]]) == 0
        nproc, count, dashes, *script = words[2:]
        assert (nproc, dashes) == ("--nproc", "--")
        self.printed += run_script(self.folder, int(count), script)

    def losses(self, what: str) -> list[float]:
        return [float(loss) for loss in re.findall(rf"^{what} \d: (\S+)$", self.printed, re.M)]


def _is_run(block: Block) -> bool:
    return block.language == "bash" and not block.needs


def _page(name: str, factory: pytest.TempPathFactory) -> Page:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
            monkeypatch.delenv(variable, raising=False)
        return Page(PAGES[name], factory.mktemp("page"), monkeypatch)


@pytest.fixture(scope="module")
def bmtrain(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return _page("bmtrain.md", tmp_path_factory)


@pytest.fixture(scope="module")
def model_center(tmp_path_factory: pytest.TempPathFactory) -> Page:
    assert find_spec("model_center") is not None, "model-center 1.0.2 is not installed: make install"
    return _page("model_center.md", tmp_path_factory)


def _assert_learned(losses: list[float]) -> None:
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1


def test_a_split_bmtrain_program_prints_the_losses_of_a_whole_one(bmtrain: Page) -> None:
    _assert_learned(bmtrain.losses("plain"))
    assert bmtrain.losses("split") == pytest.approx(bmtrain.losses("plain"), abs=2e-4)  # 4 digits are shown


def test_a_wrapped_program_prints_the_same_on_one_and_two_ranks(bmtrain: Page) -> None:
    losses = bmtrain.losses("wrapped")
    _assert_learned(losses[:4])
    assert losses[4:] == pytest.approx(losses[:4], abs=2e-4)


def test_model_centers_llama_prints_the_same_on_one_and_two_ranks(model_center: Page) -> None:
    one, two = model_center.losses("1 ranks, step"), model_center.losses("2 ranks, step")
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


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_checked(name: str) -> None:
    named = [block.file for block in PAGES[name] if block.language == "python"]
    shell = "\n".join(block.text for block in PAGES[name] if block.language == "bash" and not block.needs)
    assert None not in named and [file for file in named if str(file) not in shell] == []
    assert {block.language for block in PAGES[name]} <= {"bash", "python"}
    for block in PAGES[name]:
        if block.needs:
            subprocess.run(["bash", "-n", "-c", block.text], check=True)


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert text.isascii()


def test_the_training_command_takes_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = (block for block in PAGES["model_center.md"] if block.needs == "gpus")
    parser = CommandParser(prog="bmburst train", description="")
    configure(parser)
    monkeypatch.chdir(tmp_path)
    words = [word.replace("model_center_ext", str(ROOT / "model_center_ext")) for word in block.text.split()[2:]]
    config = settle(parser.read(words))
    assert (config.model.num_kv_heads, config.dtype, config.sequence_length) == (8, "bfloat16", 8192)
