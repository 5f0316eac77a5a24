"""Models of transformers on split sequences against themselves, unsharded, in fp64 and with their own attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_families import tiny_model
from bmburst.integrations.transformers import Part, SplitSequences, recompute, register
from bmburst.integrations.transformers_attention import attention
from bmburst.integrations.transformers_head import CHUNK
from bmburst_ops import IGNORE_INDEX
from tests.attention.counting import count_forward
from tests.distributed.processes import run_processes
from tests.distributed.threads import mesh_of
from tests.errors import relative_error, too_far
from tests.integrations import transformers_program as program
from tests.pairs import long

CASES = program.cases()
ALONE = mesh_of()
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


@pytest.fixture(scope="module", params=[1, 2, *long(4)], ids=lambda size: f"{size}-ranks")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What is found on sequences over some ranks; FSDP2 and DDP have 4, in one group or two."""
    size: int = request.param
    if size == 1:
        return {name: program.alone(case, ALONE) for name, case in CASES.items()}
    folder: Path = tmp_path_factory.mktemp("transformers")
    run_processes(size, program.run, folder / "cases.pt")
    run_processes(4, program.run_wrapped, folder / "wrapped.pt", size)
    found: dict[str, Found] = torch.load(folder / "cases.pt") | torch.load(folder / "wrapped.pt")
    return found


def _wrong(ours: Found, theirs: Found) -> dict[str, float]:
    """Return the errors of gradients that are further off than fp32 rounding."""
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    return too_far(ours["gradients"], theirs["gradients"])


def test_logits_loss_and_gradients(results: dict[str, Found], reference: dict[str, Found]) -> None:
    ours = {name: found for name, found in results.items() if name in CASES}
    assert ours.keys() == CASES.keys()
    errors = {name: relative_error(found["logits"], reference[name]["logits"]) for name, found in ours.items()}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    assert {name: _wrong(found, reference[name]) for name, found in ours.items()} == {name: {} for name in ours}


def test_under_fsdp2_and_ddp(results: dict[str, Found], reference: dict[str, Found]) -> None:
    """Two samples as two micro-batches of one group, or one for each of two groups; layers are computed again."""
    wrapped = {name: found for name, found in results.items() if name.startswith(("fsdp2", "ddp"))}
    wrong = {name: _wrong(found, reference["mistral plain"]) for name, found in wrapped.items()}
    assert wrong == {name: {} for name in wrapped}


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_scale_narrow_values_and_autocast(low: torch.dtype | None) -> None:
    """As multi-head latent attention calls it, and norms and rotary embeddings under autocast leave it."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 14, 16, generator=draw), torch.randn(1, 2, 14, 16, generator=draw)
    v = torch.randn(1, 2, 14, 10, generator=draw)
    mask = SplitSequences(ALONE).part(torch.arange(14)[None]).mask.seen()
    with torch.autocast("cpu", low, enabled=low is not None):
        out, weights = attention(torch.nn.Module(), q, k, v if low is None else v.to(low), mask, scaling=0.7)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=0.7, enable_gqa=True
    )
    assert weights is None and out.dtype == (low or torch.float32) and out.is_contiguous()
    assert relative_error(out.double(), expected.transpose(1, 2)) < (1e-5 if low is None else 2e-2)


def test_attention_runs_once_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    calls: list[object] = []
    count_forward(monkeypatch, calls.append)
    part = SplitSequences(ALONE).part(torch.arange(14)[None])
    gradients = {}
    policies = {"none": 2, "block-keep-attention": 2, "block-keep-attention:0.5": 2, "block": 4, "block+first-1": 3}
    for policy, times in policies.items():
        model = program.make_model("qwen3", "bmburst", torch.float32).train()
        recompute(model, policy)
        calls.clear()
        part.loss(model).backward()
        assert len(calls) == times, policy
        gradients[policy] = model.model.layers[0].mlp.up_proj.weight.grad
    for policy, gradient in gradients.items():
        assert relative_error(gradient, gradients["none"]) < 1e-6, policy


def test_dropout_of_a_classifier_is_not_that_of_a_causal_lm() -> None:
    """Its rate is in the configuration by default, and recomputation was refused."""
    register()
    part, gradients = SplitSequences(ALONE).part(torch.arange(14)[None]), []
    for recomputes in (False, True):
        model = tiny_model("gpt_neox", "bmburst").train()
        model.config.classifier_dropout = 0.1
        if recomputes:
            recompute(model)
        part.loss(model).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert relative_error(gradients[1], gradients[0]) < 1e-6


def test_logits_may_be_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are summed in fp32, a chunk at a time, and the gradient is the logits'."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(1, CHUNK + 3, 7, generator=draw).bfloat16().requires_grad_()
    labels = torch.randint(7, (1, CHUNK + 3), generator=draw)
    labels[0, ::3] = IGNORE_INDEX
    monkeypatch.setattr(Part, "_call", lambda *_: logits)
    part = replace(SplitSequences(ALONE, layout="contiguous").part(labels.clamp(min=0)), labels=labels)
    found = part.loss(torch.nn.Identity(), valid=1)
    found.backward()
    wide = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide[0], labels[0], reduction="sum")
    expected.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert logits.grad is not None and wide.grad is not None
    assert relative_error(logits.grad.double(), wide.grad) < 2**-8


def test_windows_and_documents_matter(reference: dict[str, Found]) -> None:
    """Otherwise the comparisons above would not see a mask that does nothing."""
    for family, config in program.FAMILIES.items():
        plain, packed = reference[f"{family} plain"], reference[f"{family} packed"]
        assert relative_error(plain["logits"], packed["logits"]) > 0.01
        if "sliding_window" in config:
            model = program.make_model(family, "eager", torch.float64, sliding_window=64)
            ids = CASES[f"{family} plain"].batch["input_ids"]
            assert relative_error(model(ids).logits, plain["logits"]) > 0.01
