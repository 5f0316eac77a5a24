"""What a Trainer does on 2 ranks is what transformers' own does on one process, and what ranks train is one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests import tiny
from tests.distributed.processes import run_processes
from tests.integrations import transformers_trainer_program as program
from tests.refusals import says

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of 2 ranks saw."""
    folder: Path = tmp_path_factory.mktemp("trainer")
    run_processes(2, program.run, folder)
    every: Found = torch.load(folder / "found.pt")
    return every


@pytest.mark.parametrize("name", program.RUNS)
def test_trains_as_one_process_after_an_evaluation(found: Found, tmp_path: Path, name: str) -> None:
    """With samples shorter than the ranks, a batch without labels, NEFTune's noise, and counts of tokens."""
    expected = program.trained(name, tmp_path, None)
    assert len(expected["losses"]) == (2 if name == "fsdp2" else 4)  # and their mean over all steps
    for rank in found:
        ours = rank["trained"][name]
        for what in ("losses", "norms"):
            assert ours[what] == pytest.approx(expected[what], rel=2e-5), what
        assert ours["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert ours["without labels"] == 1 and expected["without labels"] is None
        for what in ("tokens", "flos", "samples", "seed of workers"):
            assert ours[what] == expected[what], what
        for key, weight in expected["weights"].items():
            # AdamW divides by the gradient's size: weights with almost none differ by more than rounding.
            assert float((ours["weights"][key] - weight).abs().max()) < 2e-4, key
            assert torch.equal(ours["weights"][key], found[0]["trained"][name]["weights"][key]), key


def routes_alike(ours: dict[str, Any], theirs: dict[str, Any], steps: int) -> None:
    assert len(ours["logged"]) == len(theirs["logged"]) == steps
    for line, wanted in zip(ours["logged"], theirs["logged"], strict=True):
        assert line == pytest.approx(wanted, rel=2e-5)
    assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=1e-5)
    for key, weight in theirs["weights"].items():
        assert float((ours["weights"][key] - weight).abs().max()) < 1e-5, key


def test_router_loss_is_that_of_trl(found: Found, tmp_path: Path) -> None:
    """With accumulation, padding and a last batch that is not full."""
    expected = program.routed(tmp_path, None)
    for rank in found:
        routes_alike(rank["one group"], expected, steps=3)


@pytest.mark.long
def test_router_loss_of_two_groups_is_that_of_two_processes(tmp_path: Path) -> None:
    """As TRL does, an evaluation averages the losses of groups, of which the last batch is not full."""
    run_processes(2, program.run_groups, tmp_path)
    for rank in torch.load(tmp_path / "found.pt"):
        routes_alike(rank["two groups"], rank["TRL"], steps=2)


def test_gathered_losses_are_those_of_one_process(found: Found) -> None:
    """`gather_for_metrics` cut the last batch to one rank's share of the loss."""
    model: Any = tiny.transformers_model("qwen3", attention="sdpa", use_cache=False).eval()
    batches = [program.EVALUATED[:2], program.EVALUATED[2:3]]
    expected = [float(model(**DataCollatorWithFlattening()(batch)).loss) for batch in batches]
    for rank in found:
        assert rank["measured"] == pytest.approx(expected, rel=1e-5)


def test_ranks_that_decide_differently_end_together(found: Found) -> None:
    """One rank evaluated or ended while the other went on, until each waited for the other."""
    for rank in found:
        for (_, decision), told in zip(program.DECISIONS, rank["decided"], strict=True):
            says(told, f"disagree | fix: let callbacks | {decision} False | rank 1: TrainerControl {decision} True")


def test_ranks_of_different_trainers_end_together(found: Found) -> None:
    """Each rank trained weights of its own, without a word; or gloo ended the processes of an evaluation."""
    for rank in found:
        told = rank["different"]
        for name in ("max_grad_norm", "max_steps"):
            says(told[name], f"different arguments: {name} of rank 1 | the same numbers | fix: set {name}")
        assert not told["disable_tqdm"]  # concerns a rank alone
        for event in ("on_train_begin", "on_step_end"):
            says(told[event], "disagree | same calls | rank 0: TrainerControl | rank 1: evaluation of Split")
        says(told["fewer samples"], f"disagree | of {len(program.EVALUATED)} samples | rank 1: | of 2 samples")


def test_noise_matters_here(tmp_path: Path) -> None:
    plain = program.trainer(tmp_path, None, program.padded)
    plain.train()
    with_noise = program.trained("noise", tmp_path, None)
    assert abs(plain.state.log_history[0]["loss"] - with_noise["losses"][0]) > 1e-3


def test_loops_that_average_gradients_take_their_steps(found: Found) -> None:
    for name in ("ddp", "ddp of adapters", "fsdp2", "averaged by the script"):
        assert [rank["loops"][name] for rank in found] == [(3, "")] * 2, name


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("not averaged", 2, "gradients were not averaged | embed_tokens.weight | rank 1 | fully_shard | all_reduce"),
        ("adapters not averaged", 2, "gradients were not averaged | lora_B | fix: DistributedDataParallel"),
        ("adapters behind FSDP2", 2, "gradients were not averaged | lora_B | fully_shard"),
        ("another module wrapped", 2, "gradients were not averaged | lora_B | whole model"),
        ("layers in FSDP 1 alone", 2, "gradients were not averaged | embed_tokens.weight | whole model"),
        ("layers sharded alone", 2, "gradients were not averaged | embed_tokens.weight | whole model"),
        ("weights of two seeds", 0, "different weights | rank 1 | the same weights on every rank | fix: the same seed"),
        ("adapters of two seeds", 0, "different weights | lora_A | fix: the same seed | DistributedDataParallel"),
    ],
)
def test_loops_that_do_not_are_refused(found: Found, name: str, steps: int, words: str) -> None:
    """On every rank, at the first call after the step that let the weights drift apart."""
    for rank in found:
        taken, told = rank["loops"][name]
        assert taken == steps, told
        says(told, words)
