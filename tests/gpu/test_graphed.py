"""On real GPUs: blocks whose kernels run as CUDA graphs, against the same blocks without graphs."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import bmburst
from bmburst.blocks.presets import PRESETS
from bmburst.mesh import Mesh
from tests import lazy
from tests.distributed.programs import on_program

pytestmark = pytest.mark.gpu
CONFIG = replace(
    PRESETS["llama-3-8b"], num_layers=3, hidden_size=1024, intermediate_size=2816, num_heads=8, num_kv_heads=2,
    head_dim=128, vocab_size=4096,
)  # fmt: skip
TOKENS = 1001


@on_program(1, on_gpus=True, seconds=300)
def test_graphs_change_no_bit():
    _graphs_change_no_bit()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@on_program(2, on_gpus=True, seconds=300)
def test_graphs_change_no_bit_over_two_gpus():
    _graphs_change_no_bit()


def _graphs_change_no_bit():
    for config, level in ((CONFIG, 3), (replace(CONFIG, qk_norm=True), 2)):
        (wanted, _), (found, graphs) = (_steps(config, has_graphs, zero_level=level) for has_graphs in (False, True))
        assert graphs is not None and graphs._resources is not None
        for (loss, gradients), (other, others) in zip(found, wanted, strict=True):
            assert loss == other
            for name, gradient in gradients.items():
                assert torch.equal(gradient, others[name]), name


def _steps(config, has_graphs, **options):
    """Return losses and gradients of six steps of SGD, each of two micro-batches, and the graphs."""
    group = Mesh.over_bmtrain().sequence
    attention = partial(lazy.BurstAttention, mask="causal", deterministic=True, group=group)
    model = lazy.Llama(config, dtype=torch.bfloat16, attention=attention, block_graphs=has_graphs, **options)
    found = []
    for step in range(6):
        losses = []
        with model.model.gather_memory.unchanged():
            for part in range(2):
                generator = torch.Generator().manual_seed(2 * step + part)
                ids, labels = (torch.randint(config.vocab_size, (1, TOKENS), generator=generator) for _ in range(2))
                kinds = (ids, 0), (torch.arange(TOKENS)[None], 0), (labels, -100)
                batch = [bmburst.shard(each.cuda(), group=group, pad_value=pad) for each, pad in kinds]
                loss = model.loss(*batch, TOKENS)
                (loss / TOKENS).backward()
                losses.append(loss.item())
        torch.cuda.current_stream().wait_stream(lazy.bmt.config["load_stream"])
        gradients = {}
        for shard in lazy.named_shards(model):
            is_ordered = ".layers." in shard.name  # torch adds up the gradient of an embedding in any order
            if is_ordered and shard.parameter.grad is not None:
                gradients[shard.name] = shard.parameter.grad.clone()
                with torch.no_grad():
                    shard.local().sub_(shard.parameter.grad, alpha=0.1)
            shard.parameter.grad = shard.storage.grad = None
        found.append((losses, gradients))
    return found, model.graphs
