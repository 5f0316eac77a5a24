"""GRPO and RLOO on split sequences are those of TRL on the same processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import run_processes
from tests.integrations import transformers_grpo_program as program
from tests.integrations import transformers_grpo_tools as tools
from tests.pairs import long
from tests.refusals import says

# TRL computes losses and metrics in fp32; weights are in fp64.
RELATIVE, ABSOLUTE = 2e-5, 2e-6


def _check(root: Path, size: int, names: list[str], sequence: int | None = None) -> None:
    program.folder_of(root)
    if "experts" in names:
        program.folder_of(root, family="qwen3_moe")
    if {*tools.KINDS} & {*names}:
        tools.folder_of(root)
    run_processes(size, program.run, root, names, sequence or size)
    ranks = [torch.load(root / f"found{rank}.pt") for rank in range(size)]
    for name in names:
        for found in ranks:
            _require_equal(name, found[name, True], found[name, False])
        if name == "shared":  # a prompt is most of a row, and read once for the rows of all ranks of a group
            mine, theirs = (sum(found[name, is_split]["computed"] for found in ranks) for is_split in (True, False))
            assert theirs / (2 * (sequence or size)) < mine < 1.2 * theirs / (2 * (sequence or size))
        for found in ranks if name == "rloo" and size > 1 else ():
            says(found["decided", True]["told"], "disagree | let callbacks decide | should_training_stop True")
        if name in tools.KINDS:
            assert any(0 < line.get("tools/failure_frequency", 0) < 1 for line in ranks[0][name, False]["logged"])
        first = ranks[0][name, True]["weights"]
        assert all(
            torch.equal(weight, rank[name, True]["weights"][key]) for key, weight in first.items() for rank in ranks
        )


def _require_equal(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["completions"] == theirs["completions"] and ours["tokens"] == theirs["tokens"] > 0, name
    assert 0 < ours["most tokens in the head"] <= 3, "of all values in rows as wide as logits; logits would be of more"
    assert len(ours["logged"]) == len(theirs["logged"]) >= 4
    for mine, other in zip(ours["logged"], theirs["logged"], strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE, nan_ok=True), (name, key)
    assert any(line.get("grad_norm", 0) > 1e-3 for line in theirs["logged"]), name
    for key, weight in theirs["weights"].items():
        mine = ours["weights"][key]
        assert float((mine - weight).abs().max()) < 1e-5, (name, key)


@pytest.mark.parametrize(
    ("size", "names"), [(3, ["rloo"]), *long((1, ["dapo", "grpo", "rloo"]), (3, ["dapo"]), (2, ["dapo", "rloo"]))]
)
def test_equals_trl(size: int, names: list[str], tmp_path: Path) -> None:
    _check(tmp_path, size, names)


def test_equals_trl_on_two_ranks(tmp_path: Path) -> None:
    _check(tmp_path, 2, ["grpo", "experts", "fsdp2", "sharded adapters", "generation", "shared"])


@pytest.mark.long
def test_equals_trl_in_its_other_losses(tmp_path: Path) -> None:
    _check(tmp_path, 2, ["adapters", "dr_grpo", "luspo", "sapo", "cispo", "vespo", "vllm"])


@pytest.mark.long
def test_equals_trl_with_tools(tmp_path: Path) -> None:
    """Rows call different tools in a number of turns of their own; TRL logs how often, and which calls fail."""
    _check(tmp_path, 2, list(tools.KINDS))


@pytest.mark.long
def test_equals_trl_with_two_groups_of_ranks(tmp_path: Path) -> None:
    _check(tmp_path, 4, list(program.GRPO), 2)
