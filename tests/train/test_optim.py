"""AdamW over ZeRO's shards is torch's AdamW over whole tensors, with weight decay on matrices only."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.programs import run_program
from tests.train.run_program import SHAPE


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_torch(ranks):
    run_program(ranks, _equals_torch)


def _equals_torch():
    from bmburst.blocks.model import Llama
    from bmburst.optim import build_optimizer
    from bmburst.train.config import OptimizerConfig
    from bmburst.zero import gather, named_shards, scatter

    # Tied: as many storages decay as do not, each of another size.
    for config in (SHAPE, replace(SHAPE, tie_embeddings=True)):
        model = Llama(config, seed=1)
        shards = named_shards(model)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.02, weight_decay=0.5))
        whole = {shard.name: torch.nn.Parameter(gather(shard)) for shard in shards}
        groups = [
            {"params": [p for p in whole.values() if (p.dim() > 1) is decays], "weight_decay": 0.5 if decays else 0.0}
            for decays in (True, False)
        ]
        expected = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                gradient = torch.randn(shard.shape, generator=generator)
                whole[shard.name].grad = gradient
                if shard.storage.grad is None:
                    shard.storage.grad = torch.zeros_like(shard.storage)
                scatter(shard, 4 * gradient, shard.storage.grad)
            expected.step()
            optimizer.step(scale=4)
        for shard in shards:
            torch.testing.assert_close(gather(shard), whole[shard.name].detach())
