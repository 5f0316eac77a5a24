"""Policies of a model's first layers: the same numbers, and computed again are these layers and no others."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from bmburst.blocks.presets import PRESETS
from bmburst.mesh import Mesh
from tests import lazy
from tests.attention.counting import count_forward
from tests.distributed.programs import on_program

MODEL = replace(PRESETS["llama-tiny"], num_layers=3)
TOKENS = 45
POLICIES = {  # how often each layer runs in a step, and how often attention does in all
    "none": ((1, 1, 1), 3),
    "block": ((2, 2, 2), 6),
    "block+first-1": ((2, 1, 1), 4),
    "block+offload+first-2": ((2, 2, 1), 5),
    "block-keep-attention+first-2": ((2, 2, 1), 3),
    "block-keep-attention+offload-all+first-1": ((2, 1, 1), 3),
    "block-keep-attention:0.5+first-2": ((2, 2, 1), 3),  # of the beginning attention is another call
}


@pytest.mark.parametrize("size", [1, 2])
@on_program()
def test_the_first_layers_are_computed_again_and_no_bit_changes(size):
    wanted = None
    for policy, expected in POLICIES.items():
        loss, gradients, counts = step(policy)
        assert counts == expected, policy
        if wanted is None:
            wanted = loss, gradients
        assert torch.equal(loss, wanted[0]), policy
        is_whole = ":" not in policy  # an end and a beginning are added up in another order
        for name, gradient in gradients.items():
            if is_whole:
                assert torch.equal(gradient, wanted[1][name]), (policy, name)
            torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-5, atol=1e-5, msg=f"{policy} {name}")


def step(policy):
    """Return the loss, the gradients of this rank's parts and the counts of one step."""
    mesh = Mesh.over_bmtrain()
    model = lazy.Llama(MODEL, attention=partial(lazy.BurstAttention, group=mesh.sequence), recompute=policy)
    shard = bmburst.SequenceShard.cut(TOKENS, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    ids = torch.randint(MODEL.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    batch, layers, attention = shard.batch(ids), Counter(), []
    blocks = [id(block.self_attn.o_proj) for block in model.model.layers]
    run = lazy.Linear.forward

    def forward(self, *args, **options):
        if id(self) in blocks:
            layers.update([blocks.index(id(self))])
        return run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy.Linear, "forward", forward)
        count_forward(patch, attention.append)
        loss = model.loss(batch.tokens, batch.positions, batch.labels, TOKENS)
        loss.backward()
    torch.cuda.current_stream().synchronize()
    gradients = {shard.name: shard.storage.grad.clone() for shard in lazy.named_shards(model)}
    return loss.detach(), gradients, (tuple(layers[i] for i in range(len(blocks))), len(attention))
