"""On real GPUs: MiniCPM's factors in the model are those on a LLaMA's weights, and cpm-kernels is refused or absent."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from tests import lazy, tiny
from tests.distributed.programs import on_program
from tests.refusals import refused

pytestmark = pytest.mark.gpu
TOKENS = 1001
PLAIN = tiny.config(
    vocab_size=512, hidden_size=256, intermediate_size=704, num_layers=3, max_position_embeddings=4096, init_std=0.1
)
SCALED = replace(PLAIN, scale_emb=3.0, scale_depth=0.8, dim_model_base=128)
FACTORS = {
    "embed_tokens.weight": 3.0,
    "o_proj.weight": 0.8 / 3**0.5,
    "down_proj.weight": 0.8 / 3**0.5,
    "lm_head.weight": 0.5,
}


@pytest.mark.parametrize("size", range(1, min(torch.cuda.device_count(), 2) + 1))
@on_program(on_gpus=True, seconds=300)
def test_factors_are_those_on_weights(size):
    mesh = bmburst.Mesh.over_bmtrain()
    attention = partial(lazy.BurstAttention, group=mesh.sequence)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (1, TOKENS + 1), generator=generator).cuda()
    cut = bmburst.SequenceShard.cut(TOKENS, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    batch = cut.batch(ids[:, :-1], ids[:, 1:])
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        for recompute in ("none", "block-keep-attention"):
            make = partial(lazy.Llama, attention=attention, dtype=dtype, recompute=recompute, seed=None)
            scaled, plain = make(SCALED), make(PLAIN)
            weights = torch.Generator().manual_seed(1)
            for ours, theirs in zip(lazy.named_shards(scaled), lazy.named_shards(plain), strict=True):
                full = torch.randn(ours.shape, generator=weights) * 0.1 + (len(ours.shape) == 1)
                lazy.scatter(ours, full.cuda())
                lazy.scatter(theirs, full.cuda() * _factor(ours.name))
            losses = []
            for model in (scaled, plain):
                loss = model.loss(batch.tokens, batch.positions, batch.labels, TOKENS)
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=most)
            for ours, theirs in zip(lazy.named_shards(scaled), lazy.named_shards(plain), strict=True):
                found, wanted = lazy.gather(ours, ours.parameter.grad), lazy.gather(theirs, theirs.parameter.grad)
                wanted = wanted * _factor(ours.name)
                assert (found - wanted).float().norm() <= most * wanted.float().norm(), (dtype, recompute, ours.name)


def _factor(name):
    return next((factor for end, factor in FACTORS.items() if name.endswith(end)), 1.0)


@on_program(1, on_gpus=True, seconds=120)
def test_norms_by_cpm_kernels_are_refused_where_its_code_does_not_run():
    major, minor = torch.cuda.get_device_capability()
    # On older GPUs the package is not of the test environment.
    with refused("cpm-kernels", f"{major}.{minor}" if major >= 9 else "not installed", lines=2):
        lazy.Llama(PLAIN, dtype=torch.float16, norm_kernel="cpm-kernels")
