"""Measures one cell of the paper's benchmark on a rank: times of the slowest rank, bytes received, peak memory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.methods import LocalKernel, Setting, all_methods
from benchmarks.attention.methods.method import Method, prepare, random_inputs
from benchmarks.engine.kind import Row
from benchmarks.engine.rank import RankRun
from benchmarks.engine.timing import RankGroup, Times, in_turns, once
from benchmarks.paper.kind import AT_THE_END, BURST, KV, NO_OVERLAP, WHOLE_TILE, PaperCell
from benchmarks.paper.variants import Counting, Waiting, WholeTile, backward_transfers, forward_at_the_end
from bmburst.amounts import GIB
from bmburst.attention.api import resolve_group
from bmburst.attention.call import AttentionCall, decide
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst_ops.flash import BackwardInputs, Partial
from bmburst_ops.merge import row_dots

Call = Callable[[], object]


class PaperRun(RankRun[PaperCell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        self.kernel, self.methods = LocalKernel(self.job.kernel), all_methods(self.device.type)
        world, alone = dist.group.WORLD, dist.new_group([0])
        groups = {1: alone, self.world: world} if self.world > 1 else {1: world}
        self.groups = {size: group for size, group in groups.items() if self.rank < size}

    def refusal(self, cell: PaperCell) -> str | None:
        """See `RankRun.refusal`: what does not fit is tried, and says what it asked for."""
        del cell
        return None

    def measure(self, cell: PaperCell) -> Row:
        """See `RankRun.measure`.

        * `milliseconds`: of each of the cell's calls, the slowest rank's; see `_whole` and `_ring_calls`.
        * `bytes`: that this rank receives from others in backward, of a ring.
        * `peak_gib`: of each, inputs and results included, of this rank; `peak_memory_gib`: of all, the fullest rank's.
        """
        process_group = self.groups[cell.ranks]
        assert process_group is not None  # this rank takes part
        group = RankGroup(
            process_group=process_group,
            rank=self.rank,
            size=cell.ranks,
            device=self.device,
            is_world=cell.ranks == self.world,
        )
        setting = Setting(group=group, kernel=self.kernel, kernel_name=self.job.kernel)
        method = self.methods[cell.attention.method if cell.suite in ("sequence", "batch") else "ours"]
        row: Row = {"layout": method.layout(cell.attention)}
        if cell.suite in ("sequence", "batch"):
            row |= method.resolve(cell.attention, setting)[1]
            calls = _whole(method, cell, setting)
        else:
            calls, row["bytes"] = _ring_calls(method, cell, setting)
        times, peaks = {}, {}
        for name, call in calls.items():
            self.gauge.clear()
            times[name] = asdict(self._time(call, group))
            peak = self.gauge.peak()
            peaks[name] = None if peak is None else peak / GIB
        known = [peak for peak in peaks.values() if peak is not None]
        return row | {"milliseconds": times, "peak_gib": peaks, "peak_memory_gib": max(known, default=None)}

    def _time(self, call: Call, group: RankGroup) -> Times:
        """Return a call's times; of one that takes longer than a cell may, the second one's: the first may compile."""
        longest = self.job.cell_seconds * 1e3
        if once(call, group) > longest and (taken := once(call, group)) > longest:
            return Times.of([taken])
        (times,) = in_turns(call, group=group, repeats=self.job.repeats, seconds=self.job.cell_seconds)
        return Times.of(times)


def _whole(method: Method, cell: PaperCell, setting: Setting) -> dict[str, Call]:
    """Return a whole attention's calls: forward without autograd, and forward with backward."""
    calls = prepare(method, cell.attention, setting)
    return {"forward": calls.forward, "forward_backward": calls.both}


def _ring_calls(method: Method, cell: PaperCell, setting: Setting) -> tuple[dict[str, Call], int]:
    """Return the calls of a ring over NCCL, on CPUs over gloo, and the bytes that a rank receives in backward.

    Forward and backward are the executor's own, with the part that the cell's method replaces. `transfers` is what
    backward moves, alone.
    """
    device = setting.group.device
    q, k, v, grad_out = (t.detach() for t in random_inputs(method, cell.attention, device, setting.group.rank))
    call = _ring(method, cell, setting, q, k)
    forward = partial(forward_at_the_end if cell.method == AT_THE_END else ring_forward, call, q, k, v)
    result: Partial = forward()
    given = BackwardInputs(grad_out, q, k, v, result.lse, row_dots(grad_out, result.out))
    del result
    calls: dict[str, Call] = {"forward": forward, "backward": partial(ring_backward, call, given)}
    if cell.suite == "backward":
        calls["transfers"] = partial(backward_transfers, call, given)
    counted = Counting(call.comm)
    backward_transfers(replace(call, comm=counted), given)
    return calls, counted.received


def _ring(method: Method, cell: PaperCell, setting: Setting, q: Tensor, k: Tensor) -> AttentionCall:
    options = AttentionOptions(
        mask=cell.mask,
        layout=method.layout(cell.attention),
        kernel=setting.kernel_name,
        strategy=KV if cell.method == KV else BURST,
        transport="nccl" if setting.group.device.type == "cuda" else "gloo",
    )
    call = decide(resolve_group(None), q, k, torch.empty_like(k), None, options)
    if cell.method == NO_OVERLAP:
        return replace(call, comm=Waiting(call.comm))
    return replace(call, kernel=WholeTile()) if cell.method == WHOLE_TILE else call
