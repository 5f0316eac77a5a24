"""Every block of every document is run or checked; those of a new page too, from the moment it is there.

tests/docs/scripts.py says how blocks run. A block under `<!-- needs: gpus -->`, network or time is not run, but each of
its commands is checked as far as it goes without.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from bmburst.blocks.config import LoRAConfig
from bmburst.blocks.presets import preset
from bmburst.cli import COMMANDS
from bmburst.config import leaves
from bmburst.config.fields import choices_of
from bmburst.train.config import ParallelConfig
from bmburst.train.metrics import EvalMetrics, StepMetrics
from bmburst_ops.flash import KERNELS
from tests.docs.blocks import ALONE, PATHS, ROOT, read_blocks, text_of
from tests.docs.commands import exists
from tests.docs.conftest import LAUNCHED
from tests.docs.examples import EXAMPLES, chunks, outputs, place_of
from tests.docs.scripts import LAUNCHERS

ELSEWHERE = {  # pages with a test of their own, which also looks at what is printed
    "bmtrain.md": "test_pages.py",
    "model_center.md": "test_pages.py",
    "cpm_live.md": "test_cpm_live.py",
    "families.md": "test_families.py",
    "hugging_face.md": "test_hugging_face.py",
    "multi_node.md": "test_multi_node.py",
    "hugging_face.md#fsdp2": "test_neighbours.py",
    "inference.md#serving": "test_serving.py",
    "hugging_face.md#trainer": "test_neighbours.py",
    "hugging_face.md#trl": "test_neighbours.py",
    "hugging_face.md#hybrids-with-trl": "test_neighbours.py",
    "hugging_face.md#grpo-and-rloo": "test_grpo.py",
    "hugging_face.md#accelerate-and-peft": "test_neighbours.py",
    "model_center.md#modelcenters-fine-tuning-script": "test_neighbours.py",
}
PAGES = {name: read_blocks(name) for name in (*PATHS, *ALONE)}
OURS = {name: blocks for name, blocks in PAGES.items() if blocks and name not in ELSEWHERE}
SHOWN = {"text", "output", "diff"}  # what is to be read
CONSOLE = [name for name, blocks in OURS.items() if any(block.language == "console" for block in blocks)]
LIMITS = {"README.md": 12_000, "CONTRIBUTING.md": 8_000}  # bytes: what is longer has a page in docs/


@pytest.mark.parametrize("name", OURS)
def test_blocks_run(run_page, name: str) -> None:
    run_page(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_is_printed(run_page, name: str) -> None:
    printed, at = run_page(name).printed.split(), 0
    shown = outputs(name)
    assert len(shown) >= 4
    for words in (words for text in shown for words in chunks(text)):
        end = place_of(words, printed, at)
        assert end is not None, f"this is not printed, or earlier: {' '.join(words)}"
        at = end


def test_other_words_and_distant_numbers_are_noticed() -> None:
    printed = ["step", "s", "4.86", "3,369", "heads", "x8,", "ZeRO-3"]
    assert place_of(["4.9", "3,300", "heads"], printed, 0) == 5
    for wrong in ("4.2 3,369", "4.86 3,369 ring", "4.86 3,369 heads x4,", "ZeRO-2"):
        assert place_of(wrong.split(), printed, 0) is None, wrong
    assert [len(part) for part in chunks("a b\n...\nc \\\nd\n")] == [2, 2]


def test_the_readme_is_started_by_the_launchers_it_names(run_page) -> None:
    page = run_page("README.md")
    assert page.started == set(LAUNCHERS)
    assert "rank 0 holds 502 tokens, padding included" in page.printed
    for what, steps in ((r"^step", 10), (r"^transformers, step", 3)):
        losses = [float(loss) for loss in re.findall(rf"{what} \d: loss (\S+) nats", page.printed, re.M)]
        assert len(losses) == steps and losses[-1] < losses[0] - 0.1, losses


def test_packed_documents_are_attended_to_alone(run_page) -> None:
    assert "rank 0: 4 documents, the output is that of each alone" in run_page("masks.md").printed


def test_a_run_is_trained_resumed_and_evaluated(run_page) -> None:
    page = run_page("training.md")
    assert re.search(r"bits per byte +\d", page.printed)
    assert len((page.folder / "runs/small/metrics.jsonl").read_text().splitlines()) == 8
    assert (page.folder / "runs/longer/metrics.jsonl").is_file()
    assert (page.folder / "runs/python/checkpoints/step-000002/model.safetensors").is_file()


def test_an_adapter_is_trained_resumed_merged_and_evaluated(run_page) -> None:
    page = run_page("fine_tuning.md")
    unmerged, merged = (float(loss) for loss in re.findall(r"^loss +(\S+)", page.printed, re.M))
    assert merged == pytest.approx(unmerged, abs=1e-4)
    lines = next(block.text for block in PAGES["fine_tuning.md"] if block.text.startswith("checkpoints/")).splitlines()
    names = {path.name for path in (page.folder / "runs/tuned/checkpoints/step-000004").iterdir()}
    assert names == {line.split()[0] for line in lines[1:]}


def test_the_numbers_of_an_adapter_are_as_said() -> None:
    count = LoRAConfig(rank=16).parameters(preset("llama-3-8b"))
    assert f"{count:,} numbers for llama-3-8b with rank 16" in " ".join(text_of("fine_tuning.md").split())


def test_the_first_training_run_is_a_run(run_page) -> None:
    page = run_page("index.md")
    assert len((page.folder / "runs/first/metrics.jsonl").read_text().splitlines()) == 4
    assert "rank 0: 500 tokens here, 1000 in all" in page.printed


def test_the_run_folder_is_as_shown(run_page) -> None:
    lines = next(block.text for block in PAGES["runs.md"] if block.text.startswith("config.json")).splitlines()
    names = {False: set[str](), True: set[str]()}  # those of the folder, those of a checkpoint
    for line in lines:
        if not re.search(r" (after runs|with --)", line):  # what a short run does not have
            names[line.startswith(" ")].add(line.split()[0].split("/")[0])
    run = run_page("index.md").folder / "runs/first"
    assert {path.name for path in run.iterdir()} == names[False]
    assert {path.name for path in (run / "checkpoints/step-000004").iterdir()} == names[True]


def test_fields_that_the_text_names_are_written() -> None:
    text = PATHS["runs.md"].read_text()
    table = re.search(r"^\| field \| meaning \|\n\| ---.+\n((?:\|.+\n)+)", text, re.M)
    named = [name for row in table[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(StepMetrics.__dataclass_fields__)
    sentence = re.search(r"one line to `evals.jsonl`, with the fields ([^.]+)\.", " ".join(text.split()))
    measured = [name for name in EvalMetrics.__dataclass_fields__ if name != "step"]
    assert re.findall(r"`(\w+)`", sentence[1]) == ["step", *measured]  # in the order of the line


def test_the_table_of_commands_is_the_command_line() -> None:
    rows = re.findall(r"^\| `bmburst ([\w-]+)` \|", PATHS["training.md"].read_text(), re.M)
    assert sorted(rows) == sorted(COMMANDS)


def test_the_tables_of_attention_are_the_codes() -> None:
    text = PATHS["attention.md"].read_text()
    for field in ("strategy", "transport", "kernel"):
        table = re.search(rf"^\| `{field}` \| .+\n\| ---.+\n((?:\|.+\n)+)", text, re.M)
        names = [name for row in table[1].splitlines() for name in re.findall(r"`(\S+?)`", row.split("|")[1])]
        (leaf,) = (leaf for leaf in leaves(ParallelConfig) if leaf.name == field)
        known = set(choices_of(leaf.annotation, leaf.spec)) - {"auto"}
        assert set(names) == known and len(names) == len(known), field
    kernels = [kernel.name for kernel in KERNELS]
    assert re.findall(r"^\| `(\w+)` \|", text[text.index("\n## Kernels") :], re.M)[1:9] == kernels


def test_plain_pytorch_prints_the_same_on_one_and_two_ranks(run_page) -> None:
    found = re.findall(r"^(\d) ranks a sequence, step \d: (\S+) nats", run_page("pytorch.md").printed, re.M)
    one, two = ([float(loss) for ranks, loss in found if ranks == n] for n in "12")
    assert len(one) == 4 and one[-1] < one[0] - 0.1
    assert two == pytest.approx(one, abs=2e-4)  # 4 digits are shown


def test_migrations_check_themselves_to_the_end(run_page) -> None:
    printed = run_page("migration.md").printed
    assert "zigzag, striped and a length of 509 equal one device" in printed
    assert "zigzag and contiguous pieces give one device's output" in printed
    assert "each of 4 documents as if it were alone" in printed


def test_a_mismatch_is_an_error_and_no_hang(run_page) -> None:
    told = [f"rank {rank}: burst_attention mask window of {16 + rank}, causal" for rank in (0, 1)]
    fixed = "the ranks of the group disagree; fix: pass the same value on every rank"
    assert "\n".join([fixed, *told]) in run_page("troubleshooting.md").printed


def test_a_schedule_is_printed_step_by_step(run_page) -> None:
    assert re.findall(r"^step (\d): (\d+) queries", run_page("how_it_works.md").printed, re.M)[0] == ("0", "16")


@pytest.mark.parametrize("name", CONSOLE)
def test_console_blocks_show_what_is_printed(run_page, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    for block in (block for block in OURS[name] if block.language == "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            assert run_page(name).main(shlex.split(command)[1:], status=2) == expected


@pytest.mark.parametrize("name", sorted({*PAGES} - {"multi_node.md", "inference.md#serving"}))
def test_every_block_is_run_or_checked(name: str) -> None:
    blocks, runs_files = PAGES[name], name in ELSEWHERE and name != "families.md"
    assert {block.language for block in blocks} <= {"bash", "python", "yaml", "console", *SHOWN}
    shell = "\n".join(block.text for block in blocks if block.language == "bash" and not block.needs)
    named = [str(block.file) for block in blocks if block.file and block.language != "diff"]
    assert [file for file in named if file not in shell] == []
    for block in blocks:
        assert block.file or block.language != "yaml"
        is_python = block.language == "python"
        assert block.file or not is_python or not runs_files, "only files of this page are run"
        assert not block.needs or (block.ranks if is_python else block.needs in ("gpus", "network", "time"))
    text = text_of(name)
    fences = re.findall(r"^ *(?:```|~~~)", text, re.M)
    assert len(fences) == 2 * len(blocks), "a fence that is no block: no test would see it"
    if runs_files:  # lines of a table are long, those of a diff have one sign more
        assert max(map(len, re.sub(r"^\|.*$", "", text, flags=re.M).splitlines())) <= 121


@pytest.mark.parametrize("name", [name for name in OURS if any(block.needs for block in OURS[name])])
def test_commands_that_are_not_run_exist(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bmburst.launch.launcher.launch", lambda *_: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("bmburst.train.machine.available_bytes", lambda: None)
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    for block in OURS[name]:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
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


@pytest.mark.parametrize("name", PATHS)
def test_text_is_plain_and_links_lead_somewhere(name: str) -> None:
    path = PATHS[name]
    text = path.read_text()
    assert text.isascii()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text) if not link.startswith("http")]
    assert [link for link in links if not (path.parent / link).exists()] == []
    paths = re.findall(r"`((?:bmburst|bmburst_ops|tests|benchmarks|docs|\.ci)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_pages_stay_short(name: str) -> None:
    assert PATHS[name].stat().st_size <= LIMITS[name]


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    assert tools == set(re.findall(r"\$\(BIN\)/(ruff|mypy)", (ROOT / "Makefile").read_text()))
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
