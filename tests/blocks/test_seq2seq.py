"""The encoder-decoder against transformers' BART, source and target split over 1 to 4 ranks; a task that it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.blocks import seq2seq_program as program
from tests.distributed.programs import run_program
from tests.pairs import long, selected

ALL = tuple(program.CASES)
REST = tuple(name for name in ALL if name not in program.FEW)
TIED = ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens")
Found = dict[str, Any]


def _bart(scaled: bool = False, **options: Any) -> torch.nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    still = {"dropout": 0.0, "init_std": 0.3, "scale_embedding": scaled, "attn_implementation": "eager", **options}
    model = BartForConditionalGeneration(BartConfig(**program.SIZES, **still)).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # biases are 0 and norms 1 in a fresh model: nobody would see them lost
                weight.add_(0.3 * torch.randn(weight.shape, dtype=weight.dtype))
            if name == "model.shared.weight":
                weight[1] = torch.randn(weight.shape[1], dtype=weight.dtype)  # 0 in a fresh model
    return model


def _unsplit(case: program.Case) -> Found:
    """Logits, loss and gradients of transformers, in fp64."""
    model = _bart(case.scaled)
    source, target, labels = program.data(case)
    if case.shifted and not case.pairs:
        mask = None if case.real is None else program.real_tokens(case)
        logits = model(source, mask, labels=labels).logits
    elif case.pairs:
        logits = torch.zeros(*target.shape, program.SIZES["vocab_size"], dtype=torch.float64)
        for row, (sources, targets) in enumerate(program.pairs_of(case)):
            first, start = 0, 0
            for many, tokens in zip(sources, targets, strict=True):
                if many and tokens:
                    name, said = ("labels", labels) if case.shifted else ("decoder_input_ids", target)
                    of_pair = {name: said[row, None, start : start + tokens]}
                    found = model(source[row, None, first : first + many], **of_pair).logits
                    logits[row, start : start + tokens] = found[0]
                first, start = first + many, start + tokens
    else:
        logits = model(source, decoder_input_ids=target).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if not any(tied in n for tied in TIED)}
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> dict[str, Found]:
    names = {name for names in selected(request, "names") for name in names}
    return {name: _unsplit(program.CASES[name]) for name in names}


def _error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    # The gradient of a bias of keys is 0 but for rounding: softmax does not see it.
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-2))


@pytest.mark.parametrize(("size", "names"), [(2, program.FEW), *long((1, ALL), (2, REST), (3, ALL), (4, ALL))])
def test_equals_transformers(size: int, names: tuple[str, ...], expected: dict[str, Found], tmp_path: Path) -> None:
    torch.save(_bart().state_dict(), tmp_path / "weights.pt")
    run_program(size, program.run, tmp_path / "weights.pt", tmp_path / "found.pt", names)
    for name, found in torch.load(tmp_path / "found.pt").items():
        case, wanted = program.CASES[name], expected[name]
        tolerance = 1e-5 if case.dtype == torch.float32 else 1e-10
        counted = program.data(case)[2] != -100 if case.pairs else slice(None)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance), name
        assert _error(found["logits"][counted], wanted["logits"][counted]) < tolerance, name
        assert found["gradients"].keys() == wanted["gradients"].keys()
        errors = {key: _error(found["gradients"][key], grad) for key, grad in wanted["gradients"].items()}
        assert {key: error for key, error in errors.items() if not error < tolerance} == {}, name


@pytest.mark.long
def test_reversing_is_learned_alike_on_one_rank_and_on_two(tmp_path: Path) -> None:
    losses = []
    for size in (1, 2):
        run_program(size, program.learn, tmp_path / f"{size}.pt", 56)
        losses.append(torch.load(tmp_path / f"{size}.pt"))
    assert losses[0][0] > 2.5  # nats: 16 tokens are equally likely
    assert losses[0][-1] < 0.1
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_what_cannot_be_is_refused() -> None:
    run_program(1, program.refusals)


def test_batches_that_do_not_fit_are_refused_on_every_rank() -> None:
    run_program(2, program.bad_batches)


def test_tensor_parallelism_is_refused() -> None:
    run_program(2, program.tensor_parallelism, tensor=2)
