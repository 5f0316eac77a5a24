"""Scripts of docs/hugging_face.md and docs/model_center.md: on 1 and 2 ranks the scripts train as the originals.

The original of a script is made from it: the lines under `# new` are left out, those under `# was:` are taken back. So
nothing else may change for bmburst.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

import model_center_ext
from tests.docs.blocks import read_blocks, text_of
from tests.docs.scripts import Page, run_script

# Each page's script, the file of its weights, and how many losses a run prints.
SCRIPTS = {
    "hugging_face.md#fsdp2": ("train_with_fsdp2.py", "model.safetensors", 8),
    "hugging_face.md#trainer": ("train_with_trainer.py", "model.safetensors", 10),
    "hugging_face.md#trl": ("train_with_trl.py", "adapter_model.safetensors", 10),
    "hugging_face.md#hybrids-with-trl": ("train_hybrids.py", "nemotron_h/model.safetensors", 12),
    "hugging_face.md#accelerate-and-peft": ("train_with_accelerate.py", "adapter_model.safetensors", 16),
}


def original(script: str) -> str:
    """Return a script as it is without bmburst."""
    lines = []
    for line in script.splitlines():
        _, _, note = line.partition("  # ")
        if not note.startswith("new"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(indent + note.removeprefix("was: ") if note.startswith("was: ") else line)
    return "\n".join(lines) + "\n"


def numbers(printed: str) -> list[tuple[float, ...]]:
    """Return the numbers of each line that begins with a loss."""
    lines = re.findall(r"^(?:loss|eval_loss|accuracy) \d.*$", printed, re.M)
    return [tuple(float(number) for number in re.findall(r" ([\d.]+)", line)) for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_the_original_on_one_process(run_page, name: str) -> None:
    if name in ("hugging_face.md#trl", "hugging_face.md#hybrids-with-trl"):
        pytest.importorskip("trl")
    script, weights, count = SCRIPTS[name]
    page: Page = run_page(name)
    runs = re.findall(rf"--nproc-per-node (\d) {script} (\w+)", text_of(name))
    assert {ranks for ranks, _ in runs} == {"1", "2"}

    (page.folder / "original.py").write_text(original((page.folder / script).read_text()))
    assert "bmburst" not in re.sub(r"#.*", "", (page.folder / "original.py").read_text())
    expected = numbers(run_script(page.folder, 1, ["original.py", "original"], host=False))
    assert len(expected) == count and expected[-2][0] < expected[0][0] - 0.1, expected

    found = numbers(page.printed)
    assert len(found) == count * len(runs)
    for i, (ranks, folder) in enumerate(runs):
        for ours, theirs in zip(found[count * i : count * (i + 1)], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5), (ranks, folder)  # fp32 sums, 6 digits of 5 nats
        ours, theirs = (load_file(page.folder / at / weights) for at in (folder, "original"))
        assert ours.keys() == theirs.keys()
        # AdamW divides by the gradient's size: weights with almost none differ by more than rounding.
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 5e-4


@pytest.mark.long
def test_groups_of_ranks_train_as_single_ranks(run_page) -> None:
    """4 ranks in 2 groups, under FSDP2, equal 2 processes of plain Trainer, in the last batches of evaluations too."""
    page: Page = run_page("hugging_face.md#trainer")
    script = (page.folder / "train_with_trainer.py").read_text()
    grouped = script.replace("over_process_group()", "over_process_group(sequence=2)")
    (page.folder / "groups.py").write_text(grouped.replace('report_to="none"', 'report_to="none", fsdp=True'))
    (page.folder / "original.py").write_text(original(script))
    expected = numbers(run_script(page.folder, 2, ["original.py", "original-2"], host=False))
    found = numbers(run_script(page.folder, 4, ["groups.py", "groups"], host=False))
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


FINETUNE = "model_center.md#modelcenters-fine-tuning-script"


@pytest.mark.long
def test_model_centers_finetuning_is_its_own_on_one_process(run_page) -> None:
    page: Page = run_page(FINETUNE)
    command = next(line for block in read_blocks(FINETUNE) for line in block.commands() if "one.pt" in line)
    (page.folder / "original.py").write_text(original((page.folder / "finetune_toy.py").read_text()))
    words = command.replace("finetune_toy.py", "original.py").replace("one.pt", "original.pt").split("-- ")[1].split()
    expected = numbers(run_script(page.folder, 1, words))
    assert len(expected) == 6 and len({line[0] for line in expected}) > 4, expected

    found = numbers(page.printed)
    assert len(found) == 2 * len(expected)
    for ours, theirs in zip(found, expected * 2, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    weights = [torch.load(page.folder / "toy" / name) for name in ("one.pt", "two.pt", "original.pt")]
    for ours in weights[:2]:
        # AdamW divides by the gradient's size: weights with almost none differ by more than rounding.
        assert max(float((ours[key] - weights[2][key]).abs().max()) for key in ours) < 5e-4


def test_the_lines_that_change_are_those_of_the_script() -> None:
    """ModelCenter's own file is not installed here: that its lines are these was looked up, and the result was run."""
    diff, make, toy = (block for block in read_blocks(FINETUNE) if block.language in ("diff", "python"))
    assert (make.file, toy.file) == ("make_toy.py", "finetune_toy.py")
    lines = diff.text.splitlines()[1:]
    assert all(line[:1] in "+- " for line in lines)
    _, _, loop = diff.text.partition('             input_ids = data["input_ids"]\n')
    for sign, text in (("+", toy.text), ("-", original(toy.text)), (" ", toy.text)):
        there = {line.partition("  # ")[0].strip() for line in text.splitlines()}
        of_loop = {line[1:].strip() for line in loop.splitlines() if line.startswith(sign)}
        assert {line for line in of_loop if line not in ("...", "logits = logits[torch.where(index==1)]")} <= there
    imported = re.findall(r"^\+from model_center_ext import (.+)$", diff.text, re.M)
    assert imported == ["DistributedDataLoader, Llama"]
    assert set(imported[0].split(", ")) <= set(model_center_ext.__all__)


def test_the_original_is_what_the_marks_say() -> None:
    assert original("a\nb  # new: why\n    c  # was: d\ne  # kept\n") == "a\n    d\ne  # kept\n"
    assert text_of("hugging_face.md#trainer").count("  # was: ") == 2
