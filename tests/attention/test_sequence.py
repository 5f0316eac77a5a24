"""shard and unshard are exact inverses, and transposes of each other, for any length."""

import pytest
import torch

import bmburst
from bmburst.comm.local import run_ranks
from bmburst.errors import UserError

LAYOUTS = ["contiguous", "zigzag", "striped"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_inverse_for_any_length(layout, size, dim):
    def body(comm):
        for length in (size, size + 1, 11, 24):
            shape = [2, 3, 5]
            shape[dim] = max(length, size)
            whole = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
            part = bmburst.shard(whole, dim, layout, comm, pad_value=-7)
            cut = bmburst.SequenceShard.cut(whole.shape[dim], layout=layout, size=size, rank=comm.rank)
            assert part.shape[dim] == cut.local_tokens
            moved = part.movedim(dim, 0)
            assert torch.equal(moved[: cut.real_tokens], whole.movedim(dim, 0)[cut.positions()[: cut.real_tokens]])
            assert (moved[cut.real_tokens :] == -7).all()
            assert torch.equal(bmburst.unshard(part, dim, layout, comm, whole.shape[dim]), whole)

    run_ranks(size, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_sum_of_the_ranks_losses(layout):
    """d/dx of sum_r L_r, by the definition on one rank, for losses that differ between ranks."""

    def body(comm):
        length = 13
        x = torch.randn(2, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        weights = torch.randn(comm.size, 2, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        part = bmburst.shard(x, layout=layout, group=comm)
        (bmburst.shard(weights[0], layout=layout, group=comm) * part.square()).sum().backward()
        cut = bmburst.SequenceShard.cut(length, layout=layout, size=comm.size, rank=comm.rank)
        mine = torch.zeros(length, dtype=torch.bool).index_fill(0, cut.positions()[: cut.real_tokens], True)
        assert torch.equal(x.grad, torch.where(mine, 2 * x.detach() * weights[0], 0.0))

        part = part.detach().requires_grad_()
        whole = bmburst.unshard(part, layout=layout, group=comm, length=length)
        (whole * weights[comm.rank]).sum().backward()
        torch.testing.assert_close(part.grad, cut.take(weights.sum(0)))

    run_ranks(3, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_shifts_labels_before_the_cut(layout):
    tokens = torch.arange(100, 122).reshape(2, 11)
    for size in (1, 2, 3):
        parts = [
            bmburst.SequenceShard.cut(11, layout=layout, size=size, rank=rank).batch(tokens) for rank in range(size)
        ]
        seen = {}
        for part in parts:
            for row in range(2):
                for token, label, position in zip(*(t[row].tolist() for t in part[:3]), strict=True):
                    if position < 11:
                        assert token == tokens[row, position]
                        assert label == (token + 1 if position < 10 else -100)
                        seen[row, position] = seen.get((row, position), 0) + 1
                    else:
                        assert (token, label) == (0, -100)
        assert seen == {(row, position): 1 for row in range(2) for position in range(11)}


def test_bad_input():
    def body(comm):
        with pytest.raises(UserError, match="1 tokens cannot be split over 2 ranks"):
            bmburst.shard(torch.zeros(1, 1), group=comm)
        with pytest.raises(UserError, match="unknown layout 'zig'"):
            bmburst.shard(torch.zeros(1, 4), layout="zig", group=comm)
        with pytest.raises(UserError, match="dim 2 is not a dimension"):
            bmburst.shard(torch.zeros(1, 4), dim=2, group=comm)
        with pytest.raises(UserError, match="length is 9, but 2 ranks x 4 local tokens hold 1 to 8"):
            bmburst.unshard(torch.zeros(1, 4), group=comm, length=9)
        with pytest.raises(UserError, match="disagree"):
            bmburst.shard(torch.zeros(1, 4 + comm.rank), group=comm)

    run_ranks(2, body)
