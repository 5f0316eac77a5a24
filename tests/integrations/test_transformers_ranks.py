"""Ranks that pass different arguments or models, on CPUs and as on GPUs, are told so, all of them.

Losses of the caller's own, as docs/hugging_face.md says, are those of one process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel, masking_utils

from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations import transformers_weights
from bmburst.integrations.transformers import Part, SplitSequences, register
from bmburst.integrations.transformers_attention import layer_mask
from bmburst.integrations.transformers_cache import generate
from bmburst.loss import global_mean
from tests import tiny
from tests.distributed.threads import mesh_of, run_ranks
from tests.refusals import refused

IDS = torch.arange(3, 25)[None]


def _model(**options: Any) -> PreTrainedModel:
    register()
    return tiny.transformers_model("qwen3", attention="bmburst", **options).train()


def _theta(rank: int) -> PreTrainedModel:
    return _model(rope_parameters={"rope_type": "default", "rope_theta": 1e4 + rank})


def _tokens(part: Part, *, gradient: bool = False) -> Tensor:
    return torch.zeros(1, part.cut.local_tokens, requires_grad=gradient)


CASES: dict[str, tuple[Callable[[SplitSequences, Part, int], object], str]] = {
    "whole and gathered": (
        lambda _, part, rank: (part.gathered, part.whole)[rank](_tokens(part)),
        "Part.gathered | Part.whole | the same calls in the same order",
    ),
    "a gradient on one rank": (lambda _, part, rank: part.whole(_tokens(part, gradient=rank > 0)), "with gradient"),
    "another number of parts": (lambda split, part, rank: split.valid(*[part] * (1 + rank)), "of 1 parts | of 2 parts"),
    "an input of the model": (lambda _, part, rank: part.loss(_model(), **{"foo": 1} if rank else {}), "inputs | foo"),
    "no part": (
        lambda split, part, rank: split.valid(part if rank else None),  # type: ignore[arg-type]
        "labels | parts of SplitSequences | NoneType",
    ),
    "no loss": (lambda split, _, rank: split.mean(torch.ones(()) if rank else 1.5), "a loss | one number | float"),  # type: ignore[arg-type]
    "no number of labels": (lambda _, part, rank: part.loss(_model(), valid=20 if rank else -1), "labels | -1"),
    "another number of labels": (
        lambda _, part, rank: part.loss(_model(), valid=torch.tensor(20) if rank else 19),
        "disagree | valid 19 | valid 20",
    ),
    "another grad mode": (
        lambda _, part, rank: torch.set_grad_enabled(rank == 0)(part.loss)(_model()),
        "grad mode | without gradient | with gradient",
    ),
    "another layout": (
        lambda split, _, rank: SplitSequences(split.mesh, layout=("zigzag", "striped")[rank]).part(IDS),
        "layout zigzag | layout striped",
    ),
    "another kernel": (
        lambda split, _, rank: SplitSequences(split.mesh, **({"kernel": "reference"} if rank else {})).part(IDS),
        "kernel reference",
    ),
    "another temperature": (lambda _, part, rank: part.logps(_model(), temperature=1.0 + rank), "temperature 2.0"),
    "another mode": (lambda _, part, rank: part.loss(_model().train(rank > 0)), "mode evaluation | mode training"),
    "another depth": (
        lambda _, part, rank: part.loss(_model(num_hidden_layers=1 + rank)),
        "different configurations | layer_types of rank 1 | fix: the same config.json",
    ),
    "another rope": (lambda _, part, rank: part.loss(_theta(rank)), "rope_parameters of rank 1 | fix: "),
    "another dtype": (
        lambda _, part, rank: part.loss(_model().to((torch.float32, torch.float64)[rank])),
        "dtype of rank 1",
    ),
    "another base of adapters": (
        lambda _, part, rank: part.loss(_model(seed=rank).requires_grad_(False)),
        "different weights | embed_tokens.weight of rank 1 | fix: the same seed",
    ),
    "generation with another rope": (
        lambda split, _, rank: generate(_theta(rank).eval(), IDS, mesh=split.mesh, max_new_tokens=1),
        "rope_parameters of rank 1 | fix: ",
    ),
    "generation with other weights": (
        lambda split, _, rank: generate(_model(seed=rank).eval(), IDS, mesh=split.mesh, max_new_tokens=1),
        "different weights | embed_tokens.weight of rank 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_on_gpus", [False, True])
def test_is_refused_on_all_ranks(case: str, as_on_gpus: bool) -> None:
    call, words = CASES[case]

    def body(comm: CheckedCommunicator) -> None:
        comm.always = comm.active = not as_on_gpus
        split = SplitSequences(mesh_of(comm))
        part = split.part(IDS)
        with refused(words):
            call(split, part, comm.rank)

    run_ranks(2, body)


def test_a_model_that_one_rank_has_saved(tmp_path: Path) -> None:
    """As a Trainer saves it. That changes its configuration, and the evaluation behind it was refused."""

    def body(comm: CheckedCommunicator) -> None:
        model = _model().double()
        if comm.rank == 1:
            model.save_pretrained(tmp_path)
        SplitSequences(mesh_of(comm)).part(IDS).loss(model)

    run_ranks(2, body)


def test_kinds_of_layers_in_another_order_on_each_rank() -> None:
    """Models take them from a set. A rank that was refused the second kind waited for the other one, which was gone."""
    blocks = masking_utils.blockwise_overlay(torch.full((1, 22), -1))
    near = masking_utils.and_masks(masking_utils.sliding_window_overlay(7), masking_utils.causal_mask_function)
    kinds = [masking_utils.or_masks(each, blocks) for each in (masking_utils.causal_mask_function, near)]

    def body(comm: CheckedCommunicator) -> None:
        mask = SplitSequences(mesh_of(comm), layout="balanced").part(IDS).mask
        tokens = mask.shape[-1]
        with refused("'balanced' | window of 7 tokens | fix: "):
            for kind in kinds[:: -1 if comm.rank else 1]:
                layer_mask(mask_function=kind, attention_mask=mask, q_length=tokens, kv_length=tokens)
        comm.agree("the next call")

    run_ranks(2, body)


def test_weights_that_one_rank_alone_holds_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rank waited for the others in the exchange, which they had left."""
    samples = transformers_weights._samples

    def body(comm: CheckedCommunicator) -> None:
        model, part = _model(), SplitSequences(mesh_of(comm)).part(IDS)
        model.is_of_rank = comm.rank
        with refused("weights of Qwen3ForCausalLM | 0 weights held whole | fix: "):
            part.loss(model)

    monkeypatch.setattr(transformers_weights, "_samples", lambda model: samples(model) if model.is_of_rank else {})
    run_ranks(2, body)


def test_what_is_compared_without_gradients() -> None:
    """Once, and not adapters: they may differ before they are trained, because one of their factors is zero."""
    model = _model().requires_grad_(False)
    frozen = [name for name, _ in model.named_parameters() if "lm_head" not in name]
    model.lm_head.requires_grad_(True)
    seen = transformers_weights.EqualWeights()
    with torch.no_grad():
        assert list(transformers_weights._samples(model)) == frozen
        run_ranks(1, lambda comm: seen.compare(model, comm))
        assert not seen.are_compared(model)
    assert list(transformers_weights._samples(model)) == [*frozen, "lm_head.weight"]
    assert seen.are_compared(model)


def _pooled(hidden: Tensor) -> Tensor:
    """A loss of whole sequences: of the mean and of the last of their hidden states."""
    return (hidden.mean(1) - hidden[:, -1] ** 2).sum()


def _distilled(logits: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of each token."""
    return kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def _hidden(model: PreTrainedModel, call: Callable[[], object]) -> Tensor:
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _, __, output: seen.append(output))
    call()
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["pooling", "distillation"])
@pytest.mark.parametrize("size", [2, 3])
def test_losses_of_the_callers_own(kind: str, size: int) -> None:
    """Averaged over the ranks, as DDP does, their gradients are those of one process."""
    ids = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    alone, teacher = (tiny.transformers_model("qwen3", seed=seed).eval() for seed in (0, 1))
    if kind == "pooling":
        expected = _pooled(_hidden(alone, lambda: alone(ids)))
    else:
        expected = _distilled(alone(ids).logits[:, :-1], teacher(ids).logits[:, :-1].detach()).mean()
    expected.backward()

    def body(comm: CheckedCommunicator) -> None:
        model, other = (_model(seed=seed).eval() for seed in (0, 1))
        split = SplitSequences(mesh_of(comm))
        part = split.part(ids)
        if kind == "pooling":
            loss = _pooled(part.whole(_hidden(model, lambda: part.logits(model))))
        else:
            with torch.no_grad():
                wanted = part.logits(other)
            summed = (_distilled(part.logits(model), wanted) * (part.labels != -100)).sum()
            loss = global_mean(summed, split.valid(part), comm.size)
        assert split.mean(loss.detach()) == pytest.approx(expected.item(), rel=1e-5)
        loss.backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            if theirs.grad is None:  # the head, which pools nothing
                continue
            assert mine.grad is not None
            mean = comm.all_reduce(mine.grad).wait()[0] / comm.size
            assert float((mean - theirs.grad).norm()) < 1e-4 * float(theirs.grad.norm()) + 1e-7

    run_ranks(size, body)
