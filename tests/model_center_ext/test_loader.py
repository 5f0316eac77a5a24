"""The loader deals samples to sequence groups: docs/model_center.md's script shows ModelCenter's own order."""

import pytest
from torch.utils.data import DistributedSampler

from bmburst import Mesh, MeshShape
from bmburst.comm.groups import single_rank_group
from model_center_ext import DistributedDataLoader
from tests.refusals import refused

SAMPLES = list(range(11))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_group_reads_what_a_rank_of_modelcenters_reads(groups: int, shuffle: bool) -> None:
    """Model-center 1.0.2 deals by torch's sampler, whose epoch is the number of the pass, from 1, if it shuffles."""
    alone = single_rank_group()
    for rank in range(2 * groups):
        mesh = Mesh(MeshShape(groups, 2, 1), rank, alone, alone, alone)
        loader = DistributedDataLoader(SAMPLES, shuffle, mesh=mesh, batch_size=2)
        theirs: DistributedSampler[int] = DistributedSampler(SAMPLES, groups, rank // 2, shuffle=shuffle, seed=0)
        for number in (1, 2):
            theirs.set_epoch(number)
            expected = [SAMPLES[i] for i in theirs]
            batches = [batch.tolist() for batch in loader]
            assert [sample for batch in batches for sample in batch] == expected
            assert len(loader) == len(batches) == -(-len(expected) // 2)


def test_no_mesh() -> None:
    with refused("mesh | str | over_bmtrain"):
        DistributedDataLoader(SAMPLES, mesh="world")  # type: ignore[arg-type]
