"""On real GPUs: recurrent layers over ranks in bfloat16 against their definition in fp64 on one CPU."""

import pytest
import torch

import bmburst
from bmburst.comm.groups import communicator, single_rank_group
from tests.gpu.over_gpus import GPUS, run

pytestmark = pytest.mark.gpu
DOCUMENTS = (150, 3, 1, 200, 47)
LENGTH, HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = sum(DOCUMENTS), 2, 4, 32, 48
LOW = torch.bfloat16


@pytest.mark.parametrize("size", [size for size in (1, 2, 4) if size <= GPUS])
def test_recurrent_layers_over_gpus(size):
    run("torch.distributed", size, compare, "cuda")


def compare(device):
    """Compare outputs, final states and gradients of every kind, for one sequence and for documents."""
    comm = communicator(None)
    for kind in ("gated_delta", "kda", "decay", "conv"):
        given = _inputs(kind)
        for mask in ("causal", bmburst.Documents(DOCUMENTS)):
            wanted = _results(kind, given, mask, single_rank_group())
            ours = _results(kind, {name: t.to(device, dtype_of(kind, name)) for name, t in given.items()}, mask, comm)
            for name, found in ours.items():
                error = float((found.cpu().double() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6))
                assert error < 2e-2, (kind, mask, name, error)


def dtype_of(kind, name):
    """Return the dtype in which a model gives an input: decays and states are not in 16 bits."""
    return torch.float32 if name == "g" or (name == "initial_state" and kind != "conv") else LOW


def _inputs(kind):
    """Return inputs in fp64 by name; bfloat16 represents those that are converted to it."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(LOW).double()

    if kind == "conv":
        given = {"x": draw(1, LENGTH, 70), "weight": draw(70, 4), "bias": draw(70)}
        return given | {"initial_state": draw(1, 3, 70)}
    given = {name: draw(1, LENGTH, HEADS, KEY_DIM) for name in ("q", "k")}
    given["v"] = draw(1, LENGTH, VALUE_HEADS, VALUE_DIM)
    given["g"] = -0.05 * draw(1, LENGTH, VALUE_HEADS, *([KEY_DIM] if kind == "kda" else [])).abs()
    if kind != "decay":
        given["beta"] = draw(1, LENGTH, VALUE_HEADS).sigmoid().to(LOW).double()
    return given | {"initial_state": draw(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)}


def _results(kind, given, mask, group):
    """Return the whole output, the final state and all gradients by name."""
    has_tokens = {name: t.dim() > 1 and t.shape[1] == LENGTH for name, t in given.items()}
    cut, size = {"group": group}, {"length": LENGTH}
    own = {name: bmburst.shard(t, **cut) if has_tokens[name] else t for name, t in given.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
    function = bmburst.burst_causal_conv if kind == "conv" else bmburst.burst_linear_attention
    options = {"activation": "silu"} if kind == "conv" else {"kind": kind}
    out, final = function(**leaves, mask=mask, final_state=True, **options, **size, **cut)
    share = torch.full_like(final, 1 / group.size)  # of the gradient of the final state
    grads = torch.autograd.grad((out, final), list(leaves.values()), (torch.ones_like(out), share))
    found = {"out": bmburst.unshard(out.detach(), **size, **cut), "final state": final.detach()}
    for name, grad in zip(leaves, grads, strict=True):
        whole = bmburst.unshard(grad, **size, **cut) if has_tokens[name] else group.all_reduce(grad).wait()[0]
        found[f"gradient of {name}"] = whole
    return found
