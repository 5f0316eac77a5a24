"""A split sequence gives what CPM-Ant of transformers gives for the whole one: its attention, bias and mask."""

import pytest
import torch
from transformers.models.cpmant.configuration_cpmant import CpmAntConfig
from transformers.models.cpmant.modeling_cpmant import CpmAntAttention, CpmAntModel

from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.sequence import SequenceShard
from bmburst_ops.biased import PADDING, Tokens, ant_bias, ant_relations, ant_tokens
from tests.distributed.threads import on_ranks

HEADS, DIM_HEAD, PROMPTS, LENGTH = 2, 8, 4, 33
CONFIG = CpmAntConfig(
    vocab_size=20,
    hidden_size=12,
    num_attention_heads=HEADS,
    dim_head=DIM_HEAD,
    dim_ff=8,
    num_hidden_layers=1,
    position_bias_num_buckets=12,
    position_bias_max_distance=16,
    prompt_length=PROMPTS,
    prompt_types=2,
    segment_types=3,
)


@pytest.fixture(scope="module")
def whole():
    """Inputs, modules, and what transformers makes of them, with gradients."""
    torch.manual_seed(0)
    model, layer = CpmAntModel(CONFIG).double(), CpmAntAttention(CONFIG).double()
    torch.nn.init.normal_(model.position_bias.relative_attention_bias)
    x, grad = torch.randn(2, 2, LENGTH, CONFIG.hidden_size, dtype=torch.float64)
    x.requires_grad_()
    segment, span = torch.randint(3, (2, LENGTH)), (torch.rand(2, LENGTH) < 0.1).cumsum(1)
    context, length = torch.rand(2, LENGTH) < 0.4, torch.tensor([LENGTH - PROMPTS, 20])
    mask = model._prepare_attention_mask(torch.zeros(2, LENGTH), span, context, length)
    position = torch.arange(LENGTH).expand(2, -1)
    bias = model.position_bias(position, position, segment, segment)
    out, _ = layer(x, x, mask, bias)
    table = model.position_bias.relative_attention_bias
    learned = (table, *layer.parameters())
    wanted = torch.autograd.grad(out, (x, *learned), grad)
    is_real = (position < PROMPTS) | (position >= LENGTH - length[:, None])
    tokens = ant_tokens(position, segment, span, context, is_real, 3)
    return tokens, layer, table, x.detach(), grad, out.detach(), wanted


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@on_ranks()
def test_equals_cpm_ant_of_transformers(comm, whole, size, layout):
    formula = ant_bias(num_buckets=12, num_segments=3, max_distance=16, bidirectional=True)
    tokens, layer, table, x, grad, out, wanted = whole
    cut = SequenceShard.cut(LENGTH, layout=layout, size=size, rank=comm.rank)
    mine = Tokens.unpacked(cut.take(tokens.packed(), dim=2, pad_value=PADDING))
    relations = ant_relations(3, torch.device("cpu"))
    sequence = BiasedSequence(formula=formula, relations=relations, tokens=mine, group=comm)
    learned = [p.detach().clone().requires_grad_() for p in (table, *layer.parameters())]
    local = cut.take(x).requires_grad_()
    q, k, v = (torch.nn.functional.linear(local, w).unflatten(-1, (HEADS, DIM_HEAD)) for w in learned[1:4])
    mixed, _ = biased_attention(q, k, v, learned[0], sequence)
    ours = torch.nn.functional.linear(mixed.flatten(2), learned[4])
    torch.testing.assert_close(ours, cut.take(out), rtol=1e-9, atol=1e-10)
    gradients = torch.autograd.grad(ours, (local, *learned), cut.take(grad))
    torch.testing.assert_close(gradients[0], cut.take(wanted[0]), rtol=1e-9, atol=1e-10)
    for share, expected in zip(gradients[1:], wanted[1:], strict=True):
        (total,) = comm.all_reduce(share).wait()
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-10)
