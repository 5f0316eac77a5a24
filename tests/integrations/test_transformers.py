"""Models of transformers on split sequences against themselves, unsharded, in fp64 and with their own attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmburst.comm.groups import alone
from bmburst.mesh import Mesh, MeshShape
from tests.distributed.processes import run_processes
from tests.integrations import transformers_program as program

CASES = program.cases()
Found = dict[str, Any]


@pytest.fixture(scope="module")
def reference() -> dict[str, Found]:
    """Logits, loss and gradients of the whole model on whole sequences."""
    found = {}
    for name, case in CASES.items():
        model = program.make_model(case.family, "sdpa", torch.float64).eval()
        output = model(**case.theirs, use_cache=False)
        output.loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found[name] = {"logits": output.logits.detach(), "loss": output.loss.item(), "gradients": gradients}
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Found]]:
    """What 4 ranks found, by ranks of a sequence. They are of one job: importing transformers takes the most time."""
    output: Path = tmp_path_factory.mktemp("transformers") / "results.pt"
    run_processes(4, program.run, output)
    found: dict[int, dict[str, Found]] = torch.load(output)
    return found


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda size: f"{size}-ranks")
def results(request: pytest.FixtureRequest, job: dict[int, dict[str, Found]]) -> dict[str, Found]:
    if request.param > 1:
        return job[request.param]
    mesh = Mesh(MeshShape(1, 1, 1), 0, alone(), alone(), alone())
    return {name: program.alone(case, mesh) for name, case in CASES.items()}


def _relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


def _wrong(ours: Found, theirs: Found) -> dict[str, float]:
    """Return the gradients that are further off than fp32 rounding."""
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    errors = {name: _relative(gradient, theirs["gradients"][name]) for name, gradient in ours["gradients"].items()}
    return {name: error for name, error in errors.items() if not error < 1e-5}


def _logits(name: str, ours: Found, theirs: Found) -> tuple[Tensor, Tensor]:
    """Return both models' logits of the tokens that are no padding."""
    logits, expected, compared = ours["logits"], theirs["logits"], CASES[name].compared
    if compared is not None and compared.dim() == 1:
        logits = logits[:, compared]
    elif compared is not None:
        logits, expected = logits[compared], expected[compared]
    return logits, expected


def test_logits_loss_and_gradients(results: dict[str, Found], reference: dict[str, Found]) -> None:
    ours = {name: found for name, found in results.items() if name in CASES}
    assert len(ours) >= 8
    errors = {name: _relative(*_logits(name, found, reference[name])) for name, found in ours.items()}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    assert {name: _wrong(found, reference[name]) for name, found in ours.items()} == {name: {} for name in ours}


def test_under_fsdp2_and_ddp(results: dict[str, Found], reference: dict[str, Found]) -> None:
    """Two samples as two micro-batches of one group, or one for each of two groups; layers are computed again."""
    wrapped = {name: found for name, found in results.items() if name.startswith(("fsdp2", "ddp"))}
    wrong = {name: _wrong(found, reference["mistral plain"]) for name, found in wrapped.items()}
    assert wrong == {name: {} for name in wrapped}


def test_windows_and_documents_matter(reference: dict[str, Found]) -> None:
    """Otherwise the comparisons above would not see a mask that does nothing."""
    for family, config in program.FAMILIES.items():
        plain, packed = reference[f"{family} plain"], reference[f"{family} packed"]
        assert _relative(plain["logits"], packed["logits"]) > 0.01
        if "sliding_window" in config:
            model = program.make_model(family, "eager", torch.float64, sliding_window=64)
            ids = CASES[f"{family} plain"].batch["input_ids"]
            assert _relative(model(ids).logits, plain["logits"]) > 0.01
