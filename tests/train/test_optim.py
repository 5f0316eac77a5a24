"""AdamW over ZeRO's shards is torch's AdamW over whole tensors, with weight decay on matrices only."""

from dataclasses import replace
from functools import partial

import torch

from tests.distributed.programs import run_program
from tests.train.run_program import SHAPE


def test_equals_torch():
    run_program(2, _equals_torch)


def _equals_torch():
    from bmburst.blocks.model import Llama
    from bmburst.optim import build_optimizer
    from bmburst.train.config import OptimizerConfig
    from bmburst.zero import gather, named_shards

    # Tied: as many storages decay as do not, each of another size.
    for config in (SHAPE, replace(SHAPE, tie_embeddings=True)):
        # An eps that is felt: without it Adam cancels a wrong scale of the gradient.
        model = Llama(config, seed=1)
        shards = named_shards(model)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.02, eps=0.1, weight_decay=0.5))
        whole = {shard.name: torch.nn.Parameter(gather(shard)) for shard in shards}
        groups = [
            {"params": [p for p in whole.values() if (p.dim() > 1) is decays], "weight_decay": 0.5 if decays else 0.0}
            for decays in (True, False)
        ]
        expected = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                gradient = torch.randn(shard.shape, generator=generator)
                whole[shard.name].grad = gradient
                if shard.storage.grad is None:
                    shard.storage.grad = torch.zeros_like(shard.storage)
            expected.step()
            assert optimizer.step(partial(_give, shards, whole), scale=4) == 7.0
        for shard in shards:
            torch.testing.assert_close(gather(shard), whole[shard.name].detach())


def _give(shards, whole):
    """Stands for the closure that computes gradients: they must be there before the first parameter is updated."""
    from bmburst.zero import scatter

    assert torch.is_grad_enabled()
    for shard in shards:
        scatter(shard, 4 * whole[shard.name].grad, shard.storage.grad)
    return 7.0
