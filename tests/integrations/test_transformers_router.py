"""The router's loss of models with experts, added up over ranks, is that of transformers on one rank."""

import sys

import pytest
import torch
import torch.distributed as dist

from bmburst import Mesh
from bmburst.integrations.transformers import SplitSequences, recompute, register
from bmburst.sequence.packed_tree import pack_tree
from tests import tiny
from tests.distributed.processes import on_processes
from tests.refusals import refused

FAMILIES = ("mixtral", "qwen3_moe")
LENGTH = 29


def made(family, attention, **changes):
    changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.7, "num_hidden_layers": 2}
    changes |= {"num_experts": 6, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    torch.manual_seed(3)
    model = tiny.transformers_model(family, attention=attention, **changes).double()
    model.set_experts_implementation("eager")  # others have no fp64
    return model


def batches():
    """Return batches, and where their documents are: rows without padding, with padding before and after, and packed.

    A document is the number of its row, and its tokens.
    """
    ids = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, 20:] = 0, 0
    restarting = torch.cat([torch.arange(17), torch.arange(LENGTH - 17)])[None]
    padded = ids.masked_fill(mask == 0, -100)
    packed = ids[:1].masked_fill(torch.arange(LENGTH) == 17, -100)  # no token predicts a document's first
    return [
        ({"input_ids": ids, "labels": ids}, [(0, slice(LENGTH)), (1, slice(LENGTH))]),
        ({"input_ids": ids, "labels": padded, "attention_mask": mask}, [(0, slice(9, LENGTH)), (1, slice(20))]),
        (
            {"input_ids": ids[:1], "labels": packed, "position_ids": restarting},
            [(0, slice(17)), (0, slice(17, LENGTH))],
        ),
    ]


def expected(model, ids, documents):
    """Return the loss of the tokens and that of the router, with each document alone in the model."""
    load_balancing_loss = vars(sys.modules[type(model).__module__])["load_balancing_loss_func"]
    losses, routers = [], []
    for row, tokens in documents:
        alone = ids[row, tokens][None]
        found = model(alone, use_cache=False)
        losses.append(torch.nn.functional.cross_entropy(found.logits[0, :-1], alone[0, 1:], reduction="none"))
        routers.append(found.router_logits)
    layers = tuple(torch.cat(each) for each in zip(*routers, strict=True))
    return torch.cat(losses).mean(), load_balancing_loss(layers, model.num_experts, model.num_experts_per_tok)


@pytest.mark.parametrize("size", [1, 2, 3])
@on_processes()
def test_equals_one_rank(size):
    register()
    split = SplitSequences(Mesh.over_process_group())
    for family in FAMILIES:
        theirs, ours = made(family, "sdpa"), made(family, "bmburst")
        ours.load_state_dict(theirs.state_dict())
        for batch, documents in batches():
            theirs.zero_grad()
            ours.zero_grad()
            of_tokens, of_router = expected(theirs, batch["input_ids"], documents)
            wanted = of_tokens + 0.7 * of_router
            wanted.backward()
            part = split.part(**batch)
            loss = part.loss(ours)
            loss.backward()
            assert split.mean(loss) == pytest.approx(wanted.item(), rel=1e-6)
            plain = part.loss(ours, output_router_logits=False).detach()
            assert split.mean(plain) == pytest.approx(of_tokens.item(), rel=1e-6)
            for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
                dist.all_reduce(mine.grad)
                assert (mine.grad / size - other.grad).abs().max() < 1e-6 * max(1, other.grad.abs().max()), name
    with refused("router's loss | Part.loss | output_router_logits"):
        part.logits(ours)
    with refused("rows of a tree | output_router_logits"):
        split.part(tree=pack_tree([[1, 2, 3], [1, 2, 4]])).loss(ours)
    with refused("no layer | experts | output_router_logits"):
        part.loss(made("qwen3_moe", "bmburst", mlp_only_layers=[0, 1]))
    recompute(ours.train(), "block-keep-attention")
    loss = split.part(**batches()[0][0]).loss(ours)
    ours.zero_grad()
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in ours.named_parameters() if "gate" in name)
