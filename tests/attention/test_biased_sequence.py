"""What a batch's layers share is found once, is right, and goes with the batch."""

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from bmburst.attention import biased
from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.attention.ring import visiting_kv
from bmburst.comm.groups import communicator
from bmburst.integrations.cpm_live_batch import SplitTokens
from bmburst.recompute import checkpoint
from bmburst_ops.biased import Tokens
from tests.distributed.processes import on_processes
from tests.distributed.threads import on_ranks, run_ranks
from tests.ops.biased_oracle import draw, draw_bee, reference
from tests.ops.test_biased import DEVICE, ours
from tests.refusals import refused

BATCH = draw_bee(6, 1, 40)
FORMULA, RELATIONS, TOKENS = ours(BATCH, "cpu")
WHOLE = draw(7, 1, 40, 1, 8, BATCH.rows)


def part_of(comm, device="cpu", **options):
    """Return every rank's tokens, one after another, as a new sequence; and its matrices, dO and the table."""
    here = slice(comm.rank * 40 // comm.size, (comm.rank + 1) * 40 // comm.size)
    mine = Tokens.unpacked(TOKENS.packed()[:, :, here].to(device))
    given = {"formula": FORMULA, "relations": RELATIONS.clone().to(device), "tokens": mine, "group": comm}
    q, k, v, grad = (WHOLE[i][:, here].to(device) for i in (0, 1, 2, 4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, WHOLE[3].to(device))]
    return BiasedSequence(**given | options), leaves, grad


class Launches(TorchDispatchMode):
    """Counts torch's operators and Triton's kernels by name; not the operators of which an interpreted kernel is."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.kernels, self.operators, self.is_inside = Counter(), Counter(), False
        owner, name = (triton.JITFunction, "run") if DEVICE == "cuda" else (GridExecutor, "__call__")
        launch = getattr(owner, name)

        def counted(kernel, *args, **options):
            self.kernels[kernel.fn.__name__] += 1
            self.is_inside = True
            try:
                return launch(kernel, *args, **options)
            finally:
                self.is_inside = False

        monkeypatch.setattr(owner, name, counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[str(function)] += not self.is_inside
        return function(*args, **(kwargs or {}))

    def take(self):
        """Return the kernels, but for those of all attention, and how many operators there were; begin again."""
        found = {name for name in self.kernels if not name.startswith("_")}, self.operators.total()
        assert self.kernels.total() < 10
        self.kernels.clear()
        self.operators.clear()
        return found


def test_layers_share_what_was_found(monkeypatch):
    """A second layer's calls do nothing that depends on the tokens alone, and little beside their kernels."""
    sequence, leaves, grad = part_of(communicator(None), DEVICE, kernel="triton")
    q, k, v, table = (t.detach().float().requires_grad_() for t in leaves)
    counter, per_batch = Launches(monkeypatch), {"extents_kernel", "lines_kernel", "diagonals_kernel"}
    for layer in range(2):
        with counter:
            out, _ = biased_attention(q, k, v, table, sequence)
        kernels, operators = counter.take()
        assert kernels - per_batch == {"biases_kernel", "forward_kernel"}
        assert layer == 0 or operators <= 6
        with counter:
            gradients = torch.autograd.grad(out, (q, k, v, table), grad.float())
        found, operators = counter.take()
        added = {"biases_kernel", "peaks_kernel", "keys_kernel", "queries_kernel", "table_kernel", "numbers_kernel"}
        assert found - per_batch == added
        assert layer == 0 or operators <= 20
        assert bool((kernels | found) & per_batch) == (layer == 0)
    torch.testing.assert_close(
        (out, *gradients), expected(), rtol=1e-4, atol=1e-4, check_dtype=False, check_device=False
    )


def expected():
    out, _, *gradients = reference(*WHOLE[:5], BATCH)
    return out, *gradients


@pytest.mark.parametrize("policy", ["none", "block", "block-keep-attention"])
@on_ranks(2)
def test_ranks_tell_each_other_their_tokens_once(comm, policy):
    """Whatever is computed again; then keys and values travel alone. Gradients are those of the formulas."""
    sequence, leaves, grad = part_of(comm)
    gathered, sent, gather, ring = [], [], comm.all_gather, comm.ring
    comm.all_gather = lambda tensor: (gathered.append(tensor), gather(tensor))[1]
    comm.ring = lambda *tensors, shift=1: (sent.append(len(tensors)), ring(*tensors, shift=shift))[1]
    for _ in range(2):
        out = checkpoint(policy, lambda *x: biased_attention(*x, sequence)[0], *leaves)
        gradients = torch.autograd.grad(out, leaves, grad)
    del comm.all_gather, comm.ring
    assert len(gathered) == 1 and set(sent) == {2}
    (table,) = comm.all_reduce(gradients[3]).wait()
    wanted = expected()
    torch.testing.assert_close(table, wanted[4])
    for found, whole in zip((out, *gradients[:3]), wanted[:4], strict=True):
        torch.testing.assert_close(found, whole.chunk(comm.size, 1)[comm.rank])


def test_it_runs_by_the_schedules_of_all_attention(monkeypatch):
    """Its strategy is a name: asked for a double ring, it runs over two nodes, with the same results."""
    monkeypatch.setattr(biased, "_STRATEGY", "double-ring")
    calls = []
    monkeypatch.setattr(biased, "visiting_kv", lambda call, *kv: calls.append(call) or visiting_kv(call, *kv))
    wanted = expected()

    def body(comm):
        sequence, leaves, grad = part_of(comm.hinted(2, None))
        out = biased_attention(*leaves, sequence)[0]
        gradients = torch.autograd.grad(out, leaves, grad)
        (table,) = comm.all_reduce(gradients[3]).wait()
        torch.testing.assert_close(table, wanted[4])
        for found, whole in zip((out, *gradients[:3]), wanted[:4], strict=True):
            torch.testing.assert_close(found, whole.chunk(comm.size, 1)[comm.rank])

    run_ranks(4, body)
    assert {(call.strategy.outer, call.double_ring.inter.size) for call in calls} == {("double-ring", 2)}


def test_it_goes_with_the_batch():
    """Without waiting for a collection of garbage; a graph that is to come back holds it."""
    comm = communicator(None)
    sequence, leaves, _ = part_of(comm, DEVICE, kernel="triton")
    out = biased_attention(*(t.float() for t in leaves), sequence)[0]
    made = sequence.pairs()[0].once._made
    found = [weakref.ref(t) for name, sent in made.items() if name != "lookup" for t in sent.vectors]
    assert len(found) >= 6
    gc.disable()
    try:
        del sequence, made
        assert all(tensor() is not None for tensor in found)
        del out
        assert not any(tensor() is not None for tensor in found)
    finally:
        gc.enable()


@pytest.mark.parametrize("changed", ["relations", "position", "span", "before"])
@on_ranks(2)
def test_what_is_changed_in_place_is_refused(comm, changed):
    """On every rank where one rank's was; what was begun ends as it began."""
    sequence, leaves, grad = part_of(comm)
    if changed != "before":
        out, _ = biased_attention(*leaves, sequence)
    tensor = sequence.relations if changed == "relations" else getattr(sequence.tokens, changed, TOKENS.span)
    tensor = sequence.tokens.span if changed == "before" else tensor
    if comm.rank == 0:
        tensor.add_(1)
    for given in (sequence, copy.copy(sequence)):
        with refused("changed in place", "fix: ", "new", "each batch"):
            biased_attention(*leaves, given)
    if changed != "before":
        found = torch.autograd.grad(out, leaves[0], grad)[0]
        torch.testing.assert_close(found, expected()[1].chunk(comm.size, 1)[comm.rank])


def test_a_copy_finds_its_own():
    """Of the tokens that it has, and not what was found of others'."""
    sequence, leaves, _ = part_of(communicator(None))
    first, _ = biased_attention(*leaves, sequence)
    turned = Tokens(**{name: getattr(TOKENS, name).flip(1) for name in TOKENS.__dataclass_fields__})
    other = replace(sequence, tokens=turned)
    found, _ = biased_attention(*(t.flip(1) for t in leaves[:3]), leaves[3], other)
    torch.testing.assert_close(found.flip(1), first)
    deep = copy.deepcopy(sequence)
    deep.tokens.context.fill_(1)
    again, _ = biased_attention(*leaves, deep)  # it was changed before anything was found of it
    assert not torch.allclose(again, first)


def test_inference_has_no_versions():
    with torch.inference_mode():
        sequence, leaves, grad = part_of(communicator(None))
        first, _ = biased_attention(*leaves, sequence)
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out, _ = biased_attention(*leaves, sequence)
    assert torch.equal(out, first)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad.clone())[3], expected()[4])


def test_position_biases_of_one_formula_get_one_sequence():
    comm = communicator(None)
    tokens = SplitTokens(tokens=TOKENS, relations=RELATIONS, most=10, group=comm, kernel="auto", transport="auto")
    assert tokens.under(FORMULA) is tokens.under(replace(FORMULA))
    assert tokens.under(replace(FORMULA, max_distance=30)) is not tokens.under(FORMULA)
    assert replace(tokens).under(FORMULA) is not tokens.under(FORMULA)


@on_ranks(2)
def test_ranks_that_do_not_share_alike_are_told(comm):
    sequence, leaves, _ = part_of(comm)
    biased_attention(*leaves, sequence)
    if comm.rank:
        sequence = replace(sequence)
    with refused("disagree", "new sequence", "known sequence"):
        biased_attention(*leaves, sequence)


@pytest.mark.long
@on_processes(2)
def test_a_compiled_caller():
    """The graph ends before attention and goes on after it; another batch's sequence does not compile it again."""
    comm = communicator(None)
    first, leaves, _ = part_of(comm)

    def caller(sequence, *x):
        out, lse = biased_attention(*(t * 2 for t in x), sequence)
        return (out * 3 - 1).square().sum() + lse.exp().sum()

    wanted = torch.autograd.grad(caller(first, *leaves), leaves)
    compiled = torch.compile(caller, backend="eager")
    for sequence in (first, part_of(comm)[0]):
        torch.testing.assert_close(torch.autograd.grad(compiled(sequence, *leaves), leaves), wanted)
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        assert 0 < frames <= 4
