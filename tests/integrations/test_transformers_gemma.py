"""Gemma 2 and 3 and gpt-oss on split sequences against themselves, unsharded and eager.

They have windows in some layers; Gemma 2 has softcaps, gpt-oss attention sinks and experts.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.transformers import SplitSequences, recompute, register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests import tiny
from tests.distributed.threads import mesh_of, run_ranks
from tests.pairs import pairwise
from tests.refusals import refused

IDS = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(1))
CLOSE = 1e-5
POSITIONS = torch.tensor([[*range(5), *range(32)], [*range(20), *range(17)]])
# Of scores with a standard deviation of about 8, most are bent.
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7, "pad_token_id": 0}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA, **_KINDS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**_GEMMA, **_KINDS},
    "vaultgemma": {**_GEMMA, **_KINDS, "attn_logit_softcapping": 3.0},
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, **_KINDS},
}


def make(family: str, attention: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    model: Any = tiny.transformers_model(family, attention=attention, **FAMILIES[family] | changes)
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the default has no fp64
    return model.to(dtype)


@cache
def whole(family: str, packed: bool, without: str = "") -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return logits, loss and gradients of the unsharded model: of packed documents, each document alone.

    Args:
        family: One of `FAMILIES`.
        packed: Whether `POSITIONS` begin documents.
        without: What the model does not have, "softcap" or "sinks".
    """
    changes: dict[str, Any] = {"attn_logit_softcapping": None} if without == "softcap" else {}
    model = make(family, "eager", **changes).eval()
    if without == "sinks":
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    logits, total, count = [], torch.zeros((), dtype=torch.float64), 0
    for ids, positions in zip(IDS, POSITIONS, strict=True):
        first = int((positions[1:] == 0).nonzero()) + 1
        for document in (ids[:first], ids[first:]) if packed else (ids,):
            output = model(document[None], labels=document[None], use_cache=False)
            logits.append(output.logits[0].detach())
            total = total + output.loss * (len(document) - 1)
            count += len(document) - 1
    (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(logits).unflatten(0, IDS.shape), total.item() / count, gradients


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("family", "size", "packed", "dtype"),
    pairwise(FAMILIES, [1, 2, 3], [(False, torch.float64), (True, torch.float64), (True, torch.float32)]),
)
def test_logits_loss_and_gradients(family: str, size: int, packed: bool, dtype: torch.dtype) -> None:
    """In fp64 too, no closer than fp32: models have norms and rotary angles in fp32, and Gemma's eager its softmax."""
    register()

    def body(comm: CheckedCommunicator) -> None:
        logits, loss, gradients = whole(family, packed)
        model = make(family, "bmburst", dtype)
        if packed:
            recompute(model)
        split = SplitSequences(mesh_of(comm), layout="striped" if packed else "zigzag")
        part = split.part(IDS, position_ids=POSITIONS if packed else None)
        assert distance(part.whole(part.logits(model).detach()), logits) < CLOSE
        ours = part.loss(model)
        ours.backward()
        assert split.mean(ours.detach()) == pytest.approx(loss, rel=CLOSE)
        for name, parameter in model.named_parameters():
            (total,) = comm.all_reduce(parameter.grad).wait()
            assert distance(total / size, gradients[name]) < CLOSE, name

    run_ranks(size, body)


def test_softcaps_and_sinks_matter_here() -> None:
    for family, what in (("gemma2", "softcap"), ("vaultgemma", "softcap"), ("gpt_oss", "sinks")):
        assert distance(whole(family, False, without=what)[0], whole(family, False)[0]) > 0.1
    gradients = whole("gpt_oss", True)[2]
    assert all(gradients[f"model.layers.{n}.self_attn.sinks"].abs().min() > 0 for n in range(2))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss"])
def test_generates_what_the_whole_cache_does(family: str, size: int) -> None:
    """Over two turns: the second attends to the split cache of the first, and windows begin in it."""
    register()
    options: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    eager = make(family, "eager").eval()
    prompt, later = IDS[:, :23], IDS[:, 23:]
    first = eager.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    turn = torch.cat((first, later), 1)
    second = eager.generate(turn, attention_mask=torch.ones_like(turn), **options)

    def body(comm: CheckedCommunicator) -> None:
        mesh, model = mesh_of(comm), make(family, "bmburst").eval()
        cache = SplitCache(model.config, mesh)
        assert generate(model, prompt, mesh=mesh, past_key_values=cache, **options).tolist() == first.tolist()
        assert generate(model, turn, mesh=mesh, past_key_values=cache, **options).tolist() == second.tolist()
        cache.crop(-options["max_new_tokens"])  # below 0: the last tokens, as in transformers
        assert cache.get_seq_length() == turn.shape[1] - 1
        assert generate(model, turn, mesh=mesh, past_key_values=cache, **options).tolist() == second.tolist()
        cache.crop(0)
        assert cache.get_seq_length() == 0

    run_ranks(size, body)


def test_a_softcap_that_is_none_and_a_kernel_that_has_none() -> None:
    register()
    mesh = mesh_of()
    with refused("softcap | positive | 0.0"):
        SplitSequences(mesh).part(IDS).logits(make("gemma2", "bmburst", attn_logit_softcapping=0.0))
    with refused("kernel 'cpu' | logit softcapping | reference"):
        SplitSequences(mesh, kernel="cpu").part(IDS).logits(make("gemma2", "bmburst"))
    SplitSequences(mesh, kernel="cpu").part(IDS).logits(make("gemma3_text", "bmburst"))
