"""What recurrent layers exchange: as many bytes for any number of tokens, nothing twice, equal calls."""

import pytest
import torch

import bmburst
from bmburst.comm.checks import CheckedCommunicator
from bmburst.recompute import checkpoint
from bmburst.schedule.cost import LinearCost
from tests.comm.counting import Counting
from tests.distributed.threads import on_ranks, past_first_calls, run_ranks
from tests.linear.oracle import problem
from tests.linear.split import FUNCTIONS, KINDS, fold
from tests.refusals import refused


class CountingGathers(Counting):
    """Recurrent layers gather, too."""

    def all_gather(self, tensor):
        self._count(0, tensor.nbytes * (self.size - 1))
        return super().all_gather(tensor)


def counted(comm):
    """Return the group, whose calls are not compared, and its counts."""
    counting = CountingGathers(comm.inner)
    return past_first_calls(CheckedCommunicator(counting, comm.device, always=False)), counting


def inputs(kind, tokens):
    case = problem(kind, 1, tokens)
    return {name: t.requires_grad_() for name, t in (case.tokens | case.shared).items()} | case.options


@pytest.mark.parametrize("hops", [1, 2])
def test_bytes_do_not_depend_on_the_number_of_tokens(monkeypatch, hops):
    fold(monkeypatch, hops)

    def body(comm):
        found = []
        for tokens in (4, 40):
            group, counting = counted(comm)
            out = bmburst.burst_linear_attention(**inputs("gated_delta", tokens), group=group)
            forward = counting.received
            out.sum().backward()
            found.append((forward, counting.received - forward, counting.calls))
        cost = LinearCost(size=2, links=2, transition=4 * 4 * 4 * 8, state=4 * 4 * 3 * 8)
        assert found == [(cost.forward_bytes(hops), cost.backward_bytes(hops), 2 * hops)] * 2

    run_ranks(2, body)


@on_ranks(2)
def test_documents_that_end_with_the_runs_exchange_nothing(comm):
    group, counting = counted(comm)
    mask = bmburst.Documents((5, 5))
    for kind in ("gated_delta", "conv"):
        FUNCTIONS[kind](**inputs(kind, 5), group=group, mask=mask, layout="contiguous").sum().backward()
    assert counting.calls == 0


@on_ranks(2)
def test_a_recompute_exchanges_nothing(comm):
    """It takes what forward kept; policy "block" and a checkpoint of torch exchange again."""
    found = {}
    for policy in ("none", "block", "block-keep-attention", "block-keep-attention:0.5"):
        group, counting = counted(comm)
        given = {kind: inputs(kind, 6) for kind in FUNCTIONS}

        def layers(given=given, group=group):
            return sum(FUNCTIONS[kind](**each, group=group).square().sum() for kind, each in given.items())

        checkpoint(policy, layers).backward()
        grads = [t.grad for each in given.values() for t in each.values() if isinstance(t, torch.Tensor)]
        found[policy] = counting.calls, grads
    assert [calls for calls, _ in found.values()] == [12, 18, 12, 12]
    for _, grads in found.values():
        torch.testing.assert_close(grads, found["none"][1], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_ranks_that_disagree(comm):
    given = inputs("decay", 4)
    with refused("disagree | scale"):
        bmburst.burst_linear_attention(**given, kind="decay", scale=1.0 + comm.rank, group=comm)
    # A backward on one rank alone would wait for the other.
    frozen = {name: t.detach() for name, t in given.items()}
    state = torch.zeros(1, 4, 4, 3, dtype=torch.float64, requires_grad=comm.rank == 1)
    with refused("disagree | without gradient | with gradient"):
        bmburst.burst_linear_attention(**frozen, kind="decay", initial_state=state, group=comm)


@on_ranks(2)
def test_ranks_that_hold_weights_of_other_dtypes(comm):
    """They would round differently, and exchange gradients of different sizes."""
    given = inputs("ssd", 4)
    for name in ("A", "D", "dt_bias", "dt"):
        other = given[name].detach().float() if comm.rank else given[name]
        with refused(f"disagree | {name} | float32"):
            bmburst.burst_ssd(**given | {name: other}, group=comm)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_hold_other_weights_or_states(kind):
    """Each rank would compute its tokens with its own."""

    def body(comm):
        case = problem(kind, 1, 4)
        for name in (*case.shared, "initial_state"):
            given = {**case.tokens, **case.shared, **case.options, "initial_state": case.state}
            given[name] = given[name] * (1 + comm.rank)
            with refused(f"disagree | {name} of | the same weights and states"):
                FUNCTIONS[kind](**given, group=comm)

    run_ranks(2, body)
