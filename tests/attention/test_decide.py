"""What an attention decides once for inputs of one kind."""

from dataclasses import replace

import pytest
import torch

from bmburst.attention.call import decide, head_shapes
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import SingleRank
from bmburst.comm.transports import device_name
from bmburst.schedule.cost import Placement
from bmburst.schedule.hardware import HOST, hardware_like
from bmburst.schedule.mask import Causal
from bmburst.schedule.parallelism import STRATEGIES
from bmburst.schedule.strategy import choose_strategy
from tests.attention.test_refusals import Standing
from tests.distributed.threads import run_ranks
from tests.refusals import refused

OPTIONS = AttentionOptions()


def group(*, always: bool = False) -> CheckedCommunicator:
    return CheckedCommunicator(SingleRank(torch.device("cpu")), torch.device("cpu"), always=always)


def inputs(tokens: int = 8, heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, tokens, heads, 16, dtype=dtype) for _ in range(3))


def test_like_inputs_are_decided_once():
    comm = group()
    first = decide(comm, *inputs(), None, OPTIONS)
    assert decide(comm, *inputs(), None, replace(OPTIONS)) is first
    assert first.outer is first.outer
    assert decide(group(), *inputs(), None, OPTIONS) is not first


@pytest.mark.parametrize(
    ("given", "length", "options"),
    [
        (inputs(tokens=10), None, OPTIONS),
        (inputs(heads=4), None, OPTIONS),
        (inputs(dtype=torch.bfloat16), None, OPTIONS),
        (inputs(), 7, OPTIONS),
        (inputs(), None, replace(OPTIONS, mask="full")),
        (inputs(), None, replace(OPTIONS, scale=2.0)),
        (inputs(), None, replace(OPTIONS, kernel="reference")),
        (inputs(), None, replace(OPTIONS, deterministic=True)),
    ],
)
def test_other_inputs_are_decided_anew(given, length, options):
    comm = group()
    before = decide(comm, *inputs(), None, OPTIONS)
    decided = decide(comm, *given, length, options)
    assert decided is not before
    fresh = decide(group(), *given, length, options)
    assert (decided.kernel, decided.length, decided.mask, decided.scale) == (
        *(fresh.kernel, fresh.length, fresh.mask, fresh.scale),
    )
    assert (decided.layout, decided.deterministic) == (fresh.layout, options.deterministic)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_levels_of_a_double_ring_choose_their_own_transports(strategy, monkeypatch):
    chosen = []
    spy = lambda comm, transport: chosen.append(transport) or comm  # noqa: E731
    monkeypatch.setattr("bmburst.attention.call.over_transport", spy)
    decide(group(), *inputs(), None, replace(OPTIONS, strategy=strategy))
    assert chosen == ([] if strategy == "double-ring" else ["auto"])


def test_a_plan_is_of_shapes_strides_and_direction():
    call, (q, k, v) = decide(group(), *inputs(), None, replace(OPTIONS, strategy="heads")), inputs()
    first = call.heads_plan((q, k, v), backward=False)
    assert call.heads_plan((q.clone(), k, v), backward=False) is first
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    longer = inputs(tokens=10)
    for other in (
        call.heads_plan((strided, k, v), backward=False),
        call.heads_plan(longer, backward=False),
        call.heads_plan((q, k, v, q, q[..., 0], q[..., 0]), backward=True),
    ):
        assert other is not first
    assert replace(call, scale=2.0).heads_plan((q, k, v), backward=False) == first


def test_ranks_that_compare_their_calls_decide_each():
    comm = group(always=True)
    assert decide(comm, *inputs(), None, OPTIONS) is not decide(comm, *inputs(), None, OPTIONS)


def test_a_length_that_may_change_is_read_each_time():
    comm, length = group(), torch.tensor(5)
    assert decide(comm, *inputs(), length, OPTIONS).length == 5
    length.fill_(6)
    assert decide(comm, *inputs(), length, OPTIONS).length == 6


def test_what_cannot_work_is_refused_after_what_can():
    comm = group()
    q, k, v = inputs()
    decide(comm, q, k, v, None, OPTIONS)
    with refused("k and v", "shape", "[1, 8"):
        decide(comm, q, k, v[:, :4], None, OPTIONS)
    for other, words in (
        (v.numpy(), "torch tensor"),
        (v.to_sparse(), "dense"),
        (torch.nested.nested_tensor([v[0]], layout=torch.jagged), "dense"),
        (v.to("meta"), "one device"),
        (v.as_subclass(Standing), "plain tensor"),
    ):
        with refused("v", words):
            decide(comm, q, k, other, None, OPTIONS)
    with refused("mask", "list of 2"):
        decide(comm, q, k, v, None, replace(OPTIONS, mask=["causal", "full"]))
    with refused("kernel", "['reference']"):
        decide(comm, q, k, v, None, replace(OPTIONS, kernel=["reference"]))
    with refused("length", "9", "1 to "):
        decide(comm, q, k, v, 9, OPTIONS)


def test_the_strategy_is_the_cost_models():
    """By what the ranks run on and where they lie; of GPUs the first rank's counts on all of them."""
    q, k, v = (torch.randn(1, 64, heads, 16) for heads in (8, 2, 2))

    def body(comm):
        call = decide(comm, q, k, v, None, OPTIONS)
        placement, machine = Placement("threads", 1), hardware_like(HOST)
        return call.strategy, choose_strategy(
            "auto", head_shapes(call.layout, q, k, v), 256, Causal(), placement, machine
        )

    for taken, wanted in run_ranks(4, body):
        assert taken == wanted


class OnGpus:
    """A group of ranks with a GPU each, as far as the names of the GPUs are asked for."""

    transport, device = "threads", torch.device("cuda", 0)

    def __init__(self, comm):
        self.base, self.size, self.all_gather = self, comm.size, comm.all_gather


def test_unlike_gpus_are_priced_as_the_first():
    def body(comm):
        names = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
        return device_name(OnGpus(comm), lambda _: names[comm.rank]), device_name(comm)

    assert run_ranks(2, body) == [("NVIDIA A100-SXM4-80GB", HOST)] * 2
