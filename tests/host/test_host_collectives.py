"""The stand-in's reductions, gathers and broadcasts, every rank a thread of this process."""

import pytest
import torch
from torch import Tensor

from bmburst.host.nccl import OPERATORS
from tests.distributed.threads import on_ranks
from tests.host.test_host_nccl import NUMBER, Rank, run


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", OPERATORS)
@on_ranks(run=run)
def test_reductions_in_every_dtype(me: Rank, size: int, op: str) -> None:
    count = 7

    def drawn(dtype: torch.dtype, rank: int, rows: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        low = 0 if dtype == torch.uint8 else -3  # 8 bits hold every product
        data = torch.randint(low, 4, (rows * count,), generator=generator).to(dtype)
        return data / 3 if dtype.is_floating_point else data

    def expected(parts: list[Tensor]) -> Tensor:
        wide = torch.stack([p.double() for p in parts])
        if op == "avg":
            mean = wide.mean(0)
            return (mean if parts[0].is_floating_point() else mean.trunc()).to(parts[0].dtype)
        reduce = {"sum": wide.sum, "prod": wide.prod, "max": wide.amax, "min": wide.amin}[op]
        return reduce(0).to(parts[0].dtype)

    for dtype in NUMBER:
        tolerance = (
            {"rtol": torch.finfo(dtype).eps, "atol": 1e-7} if dtype.is_floating_point else {"rtol": 0, "atol": 0}
        )
        want = expected([drawn(dtype, r) for r in range(size)])
        mine = drawn(dtype, me.rank)
        out = torch.zeros_like(mine)
        me.all_reduce(mine, out, op)
        torch.testing.assert_close(out, want, **tolerance)
        assert torch.equal(mine, drawn(dtype, me.rank)), "the source was written"
        me.all_reduce(mine, mine, op)
        assert torch.equal(mine, out)

        mine, out = drawn(dtype, me.rank), torch.zeros_like(mine)
        numbers = (count, NUMBER[dtype], OPERATORS.index(op))
        me.nccl.ncclReduce(mine.data_ptr(), out.data_ptr(), *numbers, size - 1, me.comms[0], me.stream)
        torch.testing.assert_close(out, want if me.rank == size - 1 else torch.zeros_like(want), **tolerance)
        assert torch.equal(mine, drawn(dtype, me.rank)), "the source was written"

        mine, out = drawn(dtype, me.rank, rows=size), torch.zeros_like(mine)
        me.nccl.ncclReduceScatter(mine.data_ptr(), out.data_ptr(), *numbers, me.comms[0], me.stream)
        want = expected([drawn(dtype, r, rows=size).view(size, count)[me.rank] for r in range(size)])
        torch.testing.assert_close(out, want, **tolerance)


@on_ranks(3, run=run)
def test_low_precision_sums_are_not_rounded_on_the_way(me: Rank) -> None:
    part = torch.full((9,), 2**-8, dtype=torch.bfloat16)
    part[me.rank :: 3] = 1.0  # in whatever order it is added, for some numbers 1 + 2**-8 comes first: bf16 has 1
    me.all_reduce(part, part, "sum")
    assert part.tolist() == [1 + 2**-7] * 9


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", NUMBER, ids=str)
@on_ranks(run=run)
def test_gather_and_broadcast_move_every_dtype(me: Rank, size: int, dtype: torch.dtype) -> None:
    number, comm = NUMBER[dtype], me.comms[0]
    mine, whole = torch.full((5,), me.rank + 1).to(dtype), torch.zeros(size, 5, dtype=dtype)
    me.nccl.ncclAllGather(mine.data_ptr(), whole.data_ptr(), 5, number, comm, me.stream)
    assert whole[:, 0].tolist() == list(range(1, size + 1))
    whole = torch.zeros(size, 5, dtype=dtype)
    whole[me.rank] = me.rank + 1  # in place: the source is this rank's row of the target
    me.nccl.ncclAllGather(whole[me.rank].data_ptr(), whole.data_ptr(), 5, number, comm, me.stream)
    assert whole[:, 4].tolist() == list(range(1, size + 1))
    for root in range(size):
        out = torch.zeros(5, dtype=dtype)
        me.nccl.ncclBroadcast(mine.data_ptr(), out.data_ptr(), 5, number, root, comm, me.stream)
        assert out.tolist() == [root + 1] * 5
        assert mine.tolist() == [me.rank + 1] * 5
