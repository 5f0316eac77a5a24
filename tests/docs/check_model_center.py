"""Run on each rank: the page's ModelCenter module gives what the original does on the whole sequence."""

import runpy

import bmtrain as bmt
import torch
from model_center.layer import Attention

import bmburst

block = runpy.run_path("model_center_attention.py")
layer, whole = block["layer"], block["whole"]
length, dim_head = whole.shape[1], layer.dim_head
angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, dim_head, 2) / dim_head)).repeat(1, 2)


def rotary(*heads):
    """ModelCenter's: `[batch, heads, tokens, dim_head]`, tokens numbered from 0."""
    halves = (x.chunk(2, dim=-1) for x in heads)
    return [x * angles.cos() + torch.cat((-b, a), -1) * angles.sin() for x, (a, b) in zip(heads, halves, strict=True)]


mask = torch.ones(1, length, length, dtype=torch.bool).tril()
expected = Attention.forward(layer, whole, whole, mask, position_bias=rotary)
size = float(expected.std())
assert size > 0
torch.testing.assert_close(bmburst.unshard(block["out"], length=length), expected, rtol=1e-4, atol=1e-4 * size)
bmt.print_rank("equal")
