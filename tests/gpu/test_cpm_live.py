"""Attention with CPM-Bee's bias over GPUs: a split sequence in bfloat16 is as near to fp64 as a whole one, bit for bit
the same each time, over copy engines and NCCL.
"""

import pytest
import torch

import bmburst
from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst_ops.biased import PADDING, Tokens
from tests.distributed.programs import on_program
from tests.ops.biased_oracle import draw, draw_bee
from tests.ops.test_biased import ours

pytestmark = pytest.mark.gpu
LENGTH, HEADS, HEAD_DIM = 3001, 4, 64


@on_program(min(torch.cuda.device_count(), 4), on_gpus=True)
def test_split_and_whole_sequences_agree():
    """Run on every rank."""
    batch = draw_bee(0, 1, LENGTH, instances=2)
    whole = [t.cuda() for t in draw(1, 1, LENGTH, HEADS, HEAD_DIM, batch.rows, torch.bfloat16)[:5]]
    formula, relations, tokens = ours(batch, "cuda")
    alone = bmburst.Mesh.over_bmtrain(sequence=1).sequence
    mesh = bmburst.Mesh.over_bmtrain()
    one = BiasedSequence(formula=formula, relations=relations, tokens=tokens, group=alone)
    exact = attend(whole, one)
    rounded = attend([t.bfloat16() for t in whole], one)
    cut = bmburst.SequenceShard.cut(LENGTH, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    q, k, v, table, grad = (t.bfloat16() for t in whole)
    local = [*map(cut.take, (q, k, v)), table, cut.take(grad)]
    mine = Tokens.unpacked(cut.take(tokens.packed(), dim=2, pad_value=PADDING))
    for transport in ("auto", "nccl"):
        split = BiasedSequence(
            formula=formula, relations=relations, tokens=mine, group=mesh.sequence, transport=transport
        )
        found, again = attend(local, split), attend(local, split)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        for i, name in enumerate(("out", "q", "k", "v", "table")):
            if name == "table":
                (part,) = mesh.sequence.all_reduce(found[i].float()).wait()
            else:
                part = bmburst.unshard(found[i], group=mesh.sequence, length=LENGTH)
            ours_error, whole_error = (
                ((t.double() - exact[i]).norm() / exact[i].norm()).item() for t in (part, rounded[i])
            )
            # bfloat16 keeps 8 bits; a split sequence may be no worse than one GPU, but for luck.
            assert ours_error < 1.5 * whole_error + 1e-3, (transport, name, ours_error, whole_error)


def attend(inputs, sequence):
    """Return the output and the gradients of q, k, v and the table; fp64 takes the plain kernel."""
    q, k, v, table = (t.detach().clone().requires_grad_() for t in inputs[:4])
    out, _ = biased_attention(q, k, v, table, sequence)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, table), inputs[4])]
