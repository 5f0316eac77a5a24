"""As on GPUs: the first calls of ranks that disagree are refused on all of them, and later calls exchange nothing."""

import pytest
import torch

import bmburst
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import _FIRST, CheckedCommunicator
from tests.distributed.threads import run_ranks
from tests.refusals import refused

X = torch.randn(1, 8, 4, 8, generator=torch.Generator().manual_seed(0))


def _attention(rank, comm, **options):
    q = X[:, :, : options.pop("heads", 4)].to(options.pop("dtype", X.dtype))
    bmburst.burst_attention(q.requires_grad_(options.pop("gradient", False)), q, q, group=comm, **options)


def _linear(rank, comm, **options):
    bmburst.burst_linear_attention(X, X, X, -X[..., 0].abs(), kind="decay", group=comm, **options)


def _conv(rank, comm, scale=1.0, **options):
    bmburst.burst_causal_conv(X[..., 0], scale * X[0, :4, :3, 0], group=comm, **options)


def _ssd(rank, comm, scale=1.0):
    bmburst.burst_ssd(X, X[..., 0], -scale * torch.ones(4), X, X, group=comm)


CASES = [
    (_attention, {"mask": "full"}, "mask causal | mask full"),
    (_attention, {"scale": 0.7}, "scale 0.7"),
    (_attention, {"length": 15}, "length 16 | length 15"),
    (_attention, {"layout": "striped"}, "layout zigzag | layout striped"),
    (_attention, {"dtype": torch.bfloat16}, "equal shapes and dtypes"),
    (_attention, {"heads": 2}, "equal shapes and dtypes"),
    (_attention, {"gradient": True}, "with gradient"),
    (_attention, {"sink": torch.zeros(4)}, "attention with a sink"),
    (_attention, {"mask": ("causal",)}, "attention with 1 masks"),
    (_attention, {"layout": "zag"}, "unknown layout 'zag'"),
    (_linear, {"scale": 0.3}, "scale=0.3"),
    (_linear, {"final_state": True}, "final_state True"),
    (_conv, {"activation": "silu"}, "activation silu"),
    (_conv, {"scale": 2.0}, "weight of burst_causal_conv"),
    (_ssd, {"scale": 2.0}, "A of burst_ssd"),
]


@pytest.mark.parametrize(("call", "other", "words"), CASES)
def test_ranks_that_disagree(call, other, words):
    def body(comm):
        comm.always = comm.active = False
        with refused(words):
            call(comm.rank, comm, **(other if comm.rank else {}))

    run_ranks(2, body)


def test_sinks_and_states_of_other_numbers():
    def body(comm):
        comm.always = comm.active = False
        with refused("sink of burst_attention | values | the same weights"):
            _attention(comm.rank, comm, sink=torch.full((4,), float(comm.rank)))
        with refused("initial_state of a recurrence | values"):
            _linear(comm.rank, comm, initial_state=torch.full((1, 4, 8, 8), float(comm.rank)))
        with refused("unshard | length=15 | length=16"):
            bmburst.unshard(X, group=comm, length=16 - comm.rank)
        with refused("unshard | with gradient"):
            bmburst.unshard(X.detach().requires_grad_(comm.rank > 0), group=comm)

    run_ranks(2, body)


def test_later_calls_exchange_nothing_and_are_one_call(monkeypatch):
    """The same object each time, also of the first calls: it is the key of CUDA graphs."""
    seen, exchanged = set(), []

    def watched(comm, text):
        exchanged.append(text) if comm.active else None
        return []

    def body(comm):
        comm.always = comm.active = False
        for _ in range(_FIRST + 2):
            _attention(comm.rank, comm)
            seen.add(id(decide(comm, X, X, X, None, AttentionOptions())))

    monkeypatch.setattr(CheckedCommunicator, "_exchange", watched)
    run_ranks(1, body)
    assert len(exchanged) == _FIRST and len(seen) == 1
