"""On real GPUs: the double ring over virtual nodes of one host, by copy engines inside and NCCL between them."""

import os

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import communicator
from bmburst.comm.transports import NODE_SWITCH
from tests.attention.oracle import draw, reference
from tests.gpu.test_transports import attend_alone, errors, run

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
MESHES = [mesh for mesh in ((2, 2), (2, 3), (2, 4), (4, 2)) if mesh[0] * mesh[1] <= GPUS]
BOUND = 1.35  # errors over one device's, as for a flat ring


@pytest.mark.parametrize(("nodes", "places"), MESHES)
@pytest.mark.parametrize("program", ["torch.distributed", "bmtrain"])
def test_double_ring(nodes, places, program):
    run(program, nodes * places, _double_ring, places)


def _double_ring(places):
    comm = communicator(None)
    os.environ[NODE_SWITCH] = f"node {comm.rank // places}"
    length = 701
    for heads, kv_heads, mask in ((8, 8, "causal"), (8, 2, "causal"), (4, 4, "full")):
        whole = draw(0, 1, length, heads, kv_heads, 64, torch.bfloat16)
        exact = reference(*whole[:4], mask)
        q, k, v, grad = (t.cuda().bfloat16() for t in whole[:4])
        alone = errors(attend_alone(q, k, v, grad, mask), exact)
        for transport in ("auto", "nccl"):
            mine = [bmburst.shard(t, group=comm) for t in (q, k, v, grad)]
            options = {"mask": mask, "strategy": "double-ring", "transport": transport}
            groups = decide(comm, *mine[:3], length, AttentionOptions(**options)).double_ring
            assert (groups.intra.size, groups.inter.transport) == (places, "nccl")
            assert groups.intra.transport == ("peer" if transport == "auto" else "nccl")
            for _ in range(3):  # boxes and streams are used again
                inputs = [t.clone().requires_grad_() for t in mine[:3]]
                out = bmburst.burst_attention(*inputs, length=length, group=comm, **options)
                parts = [out, *torch.autograd.grad(out, inputs, mine[3])]
                got = [bmburst.unshard(t, group=comm, length=length) for t in parts]
                excess = [ours / theirs for ours, theirs in zip(errors(got, exact), alone, strict=True)]
                assert max(excess) <= BOUND, (heads, kv_heads, options, excess)
