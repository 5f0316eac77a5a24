"""On real GPUs: the double ring over virtual nodes of one host, by copy engines inside and NCCL between them."""

import os

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.comm.transports import NODE_SWITCH
from tests.attention.oracle import draw, reference
from tests.gpu.over_gpus import GPUS, errors_of, excess, run

pytestmark = pytest.mark.gpu
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
        given = whole, mask, reference(*whole[:4], mask)
        alone = errors_of(single_rank_group(), *given)
        for transport in ("auto", "nccl"):
            mine = [bmburst.shard(t.cuda().bfloat16(), group=comm) for t in whole[:3]]
            options = {"strategy": "double-ring", "transport": transport}
            groups = decide(comm, *mine, length, AttentionOptions(mask=mask, **options)).double_ring
            assert (groups.intra.size, groups.inter.transport) == (places, "nccl")
            assert groups.intra.transport == ("peer" if transport == "auto" else "nccl")
            for _ in range(3):  # boxes and streams are used again
                found = errors_of(comm, *given, **options)
                assert found is not None and excess(found, alone) <= BOUND, (heads, kv_heads, options, found)
