"""Gradients without a graph are never returned in silence where `create_graph=True` asks for one."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch

import bmburst
from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.loss import token_logprobs, token_loss_sum
from bmburst_ops.gated_mlp import gated_mlp
from bmburst_ops.linears import linears
from bmburst_ops.rms_norm import rms_norm, stream_norm
from bmburst_ops.rotary import apply_rotary
from bmburst_ops.swiglu import swiglu
from tests.distributed.threads import on_ranks
from tests.ops.biased_oracle import draw, draw_ant
from tests.ops.test_biased import ours
from tests.refusals import refused

# The first's backward is differentiable itself (tests/attention/test_sequence.py), those of the next two are the
# identity, and the last one's gives nothing.
DIFFERENTIABLE = {"_Shard", "_Shown", "_InBackward", "_Root"}
ROOT = Path(bmburst.__file__).parents[1]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def biased(comm):
    batch = draw_ant(4, 2, 29)
    formula, relations, tokens = ours(batch, "cpu")
    q, k, v, table = (t.requires_grad_() for t in draw(5, *batch.segment.shape, 3, 8, batch.rows)[:4])
    sequence = BiasedSequence(formula=formula, relations=relations, tokens=tokens, group=comm)
    return biased_attention(q, k, v, table, sequence)[0], q


CALLS = {
    "attention": lambda q, comm: bmburst.burst_attention(q, q, q, group=comm),
    "lse": lambda q, comm: bmburst.burst_attention(q, q, q, group=comm, return_lse=True)[1],
    "unshard": lambda q, comm: bmburst.unshard(q, group=comm),
    "rotary": lambda q, _: apply_rotary(q, torch.ones(1, 6, 4, dtype=q.dtype), torch.ones(1, 6, 4, dtype=q.dtype)),
    "swiglu": lambda q, _: swiglu(q, 2 * q),
    "rms_norm": lambda q, _: rms_norm(q, random(8), 1e-5),
    "stream_norm": lambda q, _: stream_norm(q, q, random(8), 1e-5)[0],
    "linears": lambda q, _: linears(q, [random(3, 8)])[0],
    "gated_mlp": lambda q, _: gated_mlp(q, random(3, 8), random(3, 8), random(8, 3), chunk=4),
    "loss": lambda q, _: token_loss_sum(q.flatten(1, 2), random(5, 8), torch.ones(1, 12, dtype=torch.int64)),
    "logprobs": lambda q, _: token_logprobs(q, random(5, 8), torch.ones(1, 6, 2, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", [*CALLS, "biased"])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["linear", "square"])
@on_ranks(1)
def test_a_graph_of_gradients_is_refused(comm, name, loss):
    q = random(1, 6, 2, 8)
    out, q = biased(comm) if name == "biased" else (CALLS[name](q, comm), q)
    gradient = partial(torch.autograd.grad, loss(out), q, retain_graph=True)
    with refused("create_graph=True", "allowed: create_graph=False", "fix: ", "plain torch", error=ValueError):
        gradient(create_graph=True)
    assert gradient()[0].isfinite().all()


def test_every_function_of_ours_refuses():
    """But for those of benchmarks, which nobody trains with."""
    found = {}
    for path in [*(ROOT / "bmburst").rglob("*.py"), *(ROOT / "bmburst_ops").rglob("*.py")]:
        if "bench" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                (backward,) = (part for part in node.body if getattr(part, "name", "") == "backward")
                found[node.name] = [ast.unparse(decorator) for decorator in backward.decorator_list]
    assert found.keys() > DIFFERENTIABLE
    silent = {name for name, marks in found.items() if not any(mark.startswith("first_order(") for mark in marks)}
    assert silent == DIFFERENTIABLE
