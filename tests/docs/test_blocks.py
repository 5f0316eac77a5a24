"""Every block of every page of docs/ is run or checked; those of a new page too, from the moment it is there.

A page's blocks run in a folder of its own, with the files that blocks name: commands in order, scripts on as many ranks
as their command says, then the other Python blocks, one after the other in one process, or on N ranks if the first is
under `<!-- needs: N ranks -->`. A block under gpus, network or time is not run, but each of its commands is checked as
far as it goes without.
"""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bmburst.cli import main
from tests.docs.blocks import Block, read_blocks
from tests.docs.commands import exists
from tests.docs.scripts import run_script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {  # pages with a test of their own, which also looks at what is printed
    "bmtrain.md": "test_pages.py",
    "model_center.md": "test_pages.py",
    "cpm_live.md": "test_cpm_live.py",
    "families.md": "test_families.py",
    "hugging_face.md": "test_hugging_face.py",
}
PATHS = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
PATHS["benchmarks/README.md"] = ROOT / "benchmarks" / "README.md"  # a page of the site too
PAGES = {name: read_blocks(path) for name, path in PATHS.items()}
OURS = {name: blocks for name, blocks in PAGES.items() if blocks and name not in ELSEWHERE}
SHOWN = {"text", "output", "diff"}  # what is to be read
_LAUNCHERS = (["torchrun", "--nproc-per-node"], ["bmburst", "launch", "--nproc"])


class Page:
    """A page whose blocks have run: its folder, and what they printed."""

    def __init__(self, blocks: list[Block], folder: Path) -> None:
        self.folder, self.printed = folder, ""
        for block in blocks:
            if block.file:
                (folder / block.file).write_text(block.text)
        for block in blocks:
            if block.language == "bash" and not block.needs:
                for command in block.commands():
                    self.run(shlex.split(command))
        parts = [block for block in blocks if block.language == "python" and not block.file]
        if parts:
            (folder / "blocks.py").write_text("\n".join(block.text for block in parts))
            self.printed += run_script(folder, _ranks(parts[0]) or 1, ["blocks.py"])

    def run(self, words: list[str]) -> None:
        """Run a command as the shell would, without starting Python anew."""
        words, target = _redirected(words)
        for launcher in _LAUNCHERS:
            if words[: len(launcher)] == launcher:
                count, *script = (word for word in words[len(launcher) :] if word != "--")
                printed = run_script(self.folder, int(count), script, host=words[0] == "bmburst")
                break
        else:
            assert words[0] == "bmburst", f"nothing knows how to run: {shlex.join(words)}"
            if words[1] == "train":  # its ranks, without the launcher that starts them
                printed = run_script(self.folder, 2, ["-m", *words])
            else:
                out = io.StringIO()
                with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
                    assert main(words[1:]) == 0, words
                printed = out.getvalue()
        if target:
            (self.folder / target).write_text(printed)
        self.printed += printed


def _ranks(block: Block) -> int | None:
    """Return on how many ranks a block must run, None where any number will do."""
    found = re.fullmatch(r"(\d+) ranks", block.needs or "")
    return int(found[1]) if found else None


def _redirected(words: list[str]) -> tuple[list[str], str | None]:
    return (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {}


@pytest.fixture
def run_page(pages: dict[str, Page], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Return a page by name; it runs once."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(variable, raising=False)

    def run(name: str) -> Page:
        if name not in pages:
            pages[name] = Page(OURS[name], tmp_path_factory.mktemp("page"))
        return pages[name]

    return run


@pytest.mark.parametrize("name", OURS)
def test_blocks_run(run_page, name: str) -> None:
    run_page(name)


def test_the_first_training_run_is_a_run(run_page) -> None:
    page = run_page("index.md")
    assert len((page.folder / "runs/first/metrics.jsonl").read_text().splitlines()) == 4
    assert "rank 0: 500 tokens here, 1000 in all" in page.printed


def test_plain_pytorch_prints_the_same_on_one_and_two_ranks(run_page) -> None:
    found = re.findall(r"^(\d) ranks a sequence, step \d: (\S+) nats", run_page("pytorch.md").printed, re.M)
    one, two = ([float(loss) for ranks, loss in found if ranks == n] for n in "12")
    assert len(one) == 4 and one[-1] < one[0] - 0.1
    assert two == pytest.approx(one, abs=2e-4)  # 4 digits are shown


def test_migrations_check_themselves_to_the_end(run_page) -> None:
    assert "zigzag, striped and a length of 509 equal one device" in run_page("from_burst_attention.md").printed
    printed = run_page("from_ring_flash_attention.md").printed
    assert "zigzag and contiguous pieces give one device's output" in printed
    assert "each of 4 documents as if it were alone" in printed


def test_a_mismatch_is_an_error_and_no_hang(run_page) -> None:
    told = [f"rank {rank}: burst_attention mask window of {16 + rank}, causal" for rank in (0, 1)]
    fixed = "the ranks of the group disagree; fix: pass the same value on every rank"
    assert "\n".join([fixed, *told]) in run_page("troubleshooting.md").printed


def test_a_schedule_is_printed_step_by_step(run_page) -> None:
    assert re.findall(r"^step (\d): (\d+) queries", run_page("how_it_works.md").printed, re.M)[0] == ("0", "16")


@pytest.mark.parametrize("name", OURS)
def test_every_block_is_run_or_checked(name: str) -> None:
    assert {block.language for block in OURS[name]} <= {"bash", "python", *SHOWN}
    shell = "\n".join(block.text for block in OURS[name] if block.language == "bash" and not block.needs)
    named = [str(block.file) for block in OURS[name] if block.file]
    assert [file for file in named if file not in shell] == []
    for block in OURS[name]:
        is_python = block.language == "python"
        assert not block.needs or (_ranks(block) if is_python else block.needs in ("gpus", "network", "time"))
    fences = re.findall(r"^ *(?:```|~~~)", PATHS[name].read_text(), re.M)
    assert len(fences) == 2 * len(OURS[name]), "a fence that is no block: no test would see it"


@pytest.mark.parametrize("name", [name for name in OURS if any(block.needs for block in OURS[name])])
def test_commands_that_are_not_run_exist(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bmburst.runtime.launch.launch", lambda *_: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER"):
        monkeypatch.delenv(variable, raising=False)
    for block in OURS[name]:
        if block.language != "bash" or not block.needs:
            continue
        subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for command in block.commands():
            assert exists(shlex.split(command)), f"nothing knows how to check: {command}"
    assert capsys.readouterr().err == ""


def test_pages_tested_elsewhere_are() -> None:
    for page, test in ELSEWHERE.items():
        assert f'"{page}"' in (Path(__file__).parent / test).read_text()
        assert page in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_text_is_plain(name: str) -> None:
    assert PATHS[name].read_text().isascii()
