"""A split sequence with a learned bias gives what the published formulas give for the whole one, on 1 to 4 ranks."""

import math
from functools import lru_cache

import pytest
import torch

from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.comm.groups import communicator
from bmburst.sequence import SequenceShard
from bmburst_ops.biased import PADDING, Tokens
from tests.attention.test_refusals import Standing
from tests.distributed.processes import run_processes
from tests.distributed.threads import on_ranks
from tests.ops.biased_oracle import draw, draw_ant, draw_bee, reference
from tests.ops.test_biased import ours
from tests.refusals import refused

BATCHES = {"bee": draw_bee(3, 2, 45), "ant": draw_ant(4, 2, 29)}
LAYOUTS = ["contiguous", "zigzag", "striped"]


@lru_cache
def problem(name):
    batch = BATCHES[name]
    whole = draw(5, *batch.segment.shape, 3, 8, batch.rows)
    return batch, whole, reference(*whole[:5], batch, whole[5])


def attend(comm, name, layout, dtype=torch.float64, **options):
    """Cut, attend on every rank, and put everything together again."""
    batch, whole, _ = problem(name)
    formula, relations, tokens = ours(batch, "cpu")
    cut = SequenceShard.cut(whole[0].shape[1], layout=layout, size=comm.size, rank=comm.rank)
    q, k, v, grad = (cut.take(t.to(dtype)) for t in (*whole[:3], whole[4]))
    grad_lse = cut.take(whole[5].to(dtype), dim=2)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, whole[3].to(dtype))]
    mine = Tokens.unpacked(cut.take(tokens.packed(), dim=2, pad_value=PADDING))
    sequence = BiasedSequence(formula=formula, relations=relations, tokens=mine, group=comm, **options)
    out, lse = biased_attention(*leaves, sequence)
    assert not out[:, cut.real_tokens :].any() and (lse[:, :, cut.real_tokens :] == -torch.inf).all()
    seen = lse > -torch.inf
    gradients = torch.autograd.grad((out * grad).sum() + (lse[seen] * grad_lse[seen]).sum(), leaves)

    def joined(part, dim=1):
        (parts,) = comm.all_gather(part.detach()).wait()
        return cut.join(parts, dim)

    (table,) = comm.all_reduce(gradients[3]).wait()
    return [joined(out), joined(lse, 2), *map(joined, gradients[:3]), table]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BATCHES)
@on_ranks()
def test_equals_the_published_formulas(comm, size, layout, name):
    torch.testing.assert_close(attend(comm, name, layout), problem(name)[2], rtol=1e-9, atol=1e-10)


@pytest.mark.long
def test_triton_over_processes(monkeypatch):
    """Its interpreter is not for threads."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # where there are GPUs too
    run_processes(2, _over_processes)


def _over_processes():
    comm = communicator(None)
    for got, wanted in zip(
        attend(comm, "ant", "zigzag", torch.float32, kernel="triton"), problem("ant")[2], strict=True
    ):
        seen = wanted > -torch.inf
        torch.testing.assert_close(got.double()[seen], wanted[seen], rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_refuses_on_every_rank(comm):
    """Also where only one rank's input is wrong, or each's is right and they differ."""
    batch, whole, _ = problem("ant")
    formula, relations, tokens = ours(batch, "cpu")
    q, k, v, table = whole[:4]
    given = {"formula": formula, "relations": relations, "tokens": tokens, "group": comm}
    first = comm.rank == 0
    disagree = "disagree | fix: | rank 0: biased attention | rank 1: biased attention"
    for change, inputs, options, words in (
        ({}, (q, k, v, table[:-1] if first else table), {}, "bias table | [21, 3] | float64 [20, 3] | fix: "),
        ({}, (q, k, v, table.float() if first else table), {}, f"{disagree} | float32[21, 3] | float64[21, 3]"),
        ({}, (q.clone().requires_grad_() if first else q, k, v, table), {}, f"{disagree} | without gradient"),
        ({}, (q[:, 1:], k, v, table), {}, "[2, 29] | [2, 28] | fix: "),
        ({}, (q, k, v, table.as_subclass(Standing) if first else table), {}, "table | Standing | fix: | plain tensor"),
        ({}, (q, k, v, table), {"scale": 0.0}, "scale | positive | 0.0"),
        ({}, (q, k, v, table), {"scale": math.inf}, "scale | positive | inf"),
        ({"relations": relations + 30 * first}, (q, k, v, table), {}, "relation | 30 | 0 to 9"),
        ({"kernel": "fa4"}, (q, k, v, table), {}, "kernel | 'fa4' | auto, triton, reference"),
        ({"kernel": "triton"}, (q, k, v, table), {}, "'triton' | bfloat16 | torch.float64 | kernel='auto'"),
        ({"transport": "mpi"}, (q, k, v, table), {}, "transport | 'mpi' | auto, gloo, nccl, peer"),
        ({"transport": "nccl"}, (q, k, v, table), {}, "transport | 'nccl' | threads | transport='auto'"),
    ):
        with refused(words):
            biased_attention(*inputs, BiasedSequence(**given | change), **options)
