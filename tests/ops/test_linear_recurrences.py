"""Kernels of recurrences against their definition in fp64: summaries, outputs, and all gradients.

On a machine with a GPU the Triton kernels too; on a CPU the definition against dense matrices.
"""

import pytest
import torch

from bmburst_ops.errors import KernelError
from bmburst_ops.fragments import fragment_tokens, fragments
from bmburst_ops.linear import (
    KERNELS,
    Pieces,
    Recurrence,
    ReferenceKernel,
    Slots,
    TritonKernel,
    select_kernel,
)
from bmburst_ops.linear.scan import FragmentScan, make_plan
from bmburst_ops.linear.triton import unusable
from tests.linear.oracle import problem, whole
from tests.ops.another_machine import AnotherMachine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECES = Pieces((0, 70, 134, 140, 204, 211), padding=(4,), waiting=(0, 3), exporting=(1, 3))


def inputs(kind, decay, dim=32):
    """Return inputs of a flat batch in fp64 that bfloat16 represents, states before and gradients."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).bfloat16().double()

    tokens, heads, values = PIECES.edges[-1], 2, 4
    states = draw(2, values, dim, 2 * dim), draw(tokens, values, 2 * dim), draw(2, values, dim, 2 * dim)
    if kind == "scan":
        a = (-decay * draw(tokens, values, dim).abs()).exp()
        return (a, draw(tokens, values, dim)), draw(2, values, dim), draw(tokens, values, dim), draw(2, values, dim)
    g = -decay * draw(tokens, values, *((dim,) if kind == "kda" else ())).abs()
    beta = () if kind == "decay" else ((2 * draw(tokens, values).sigmoid()).bfloat16().double(),)
    return (draw(tokens, heads, dim), draw(tokens, heads, dim), draw(tokens, values, 2 * dim), g, *beta), *states


def computed(kernel, recurrence, given, starts, grad_out, grad_ends):
    scan = kernel.prepare(recurrence, given, PIECES)
    slots = Slots((2, 0), 3)
    summaries = scan.summary(slots)
    assert not summaries[1].any()
    found = dict(zip("MU", recurrence.summary_views(given, summaries), strict=True)) | {"out": scan.forward(starts)}
    scan = kernel.prepare(recurrence, given, PIECES, scan.kept())
    grad_out = grad_out.to(found["out"].dtype)
    found["starts"] = scan.start_gradients(grad_out, slots)
    grads = scan.backward(starts, grad_out, grad_ends)
    return found | {f"gradient {i}": grad for i, grad in enumerate(grads)}


class Fragments(TritonKernel):
    """Cuts pieces that are much too short to be cut otherwise."""

    def prepare(self, recurrence, given, pieces, kept=()):
        return FragmentScan(recurrence, given, pieces, 64, kept)


def low(recurrence, given, device):
    """Return inputs as a model has them: values in bfloat16, decays in fp32."""
    if recurrence.kind == "scan":
        return tuple(t.float().to(device) for t in given)
    return tuple((t.float() if i == 3 else t.bfloat16()).to(device) for i, t in enumerate(given))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the next test has it")
@pytest.mark.parametrize("kind", ["gated_delta", "kda", "decay"])
def test_fragments(kind):
    """On a CPU the kernels run in Triton's interpreter."""
    given, *rest = inputs(kind, 0.05)
    recurrence = Recurrence(kind, 0.2, normalize=True)
    exact = computed(ReferenceKernel(), recurrence, given, *rest)
    found = computed(Fragments(), recurrence, tuple(t.float() for t in given), *(t.float() for t in rest))
    for name, each in found.items():
        assert each.shape == exact[name].shape
        error = float((each.double() - exact[name]).norm() / exact[name].norm())
        assert error < 2e-5, f"{name}: {error}"


@pytest.mark.parametrize("decay", [0.0, 0.05, 8.0])
@pytest.mark.parametrize("kind", ["gated_delta", "kda", "decay", "scan"])
def test_kernels_in_half_precision(kind, decay):
    recurrence = Recurrence(kind, 0.2, normalize=kind != "decay")
    given, *rest = inputs(kind, decay)
    exact = computed(ReferenceKernel(), recurrence, given, *rest)
    tried = low(recurrence, given, DEVICE)
    able = [kernel for kernel in KERNELS if kernel.refusal(recurrence, tried) is None]
    assert "reference" in [kernel.name for kernel in able]
    if "triton" in [kernel.name for kernel in able]:
        able.append(Fragments())
    for kernel in able:
        found = computed(kernel, recurrence, tried, *(t.float().to(DEVICE) for t in rest))
        for name, ours in found.items():
            wanted = exact[name]
            error = float((ours.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6))
            assert error < 2e-2, f"{kernel.name} {name}: {error}"
        for number in PIECES.padding:
            span = PIECES.span(number)
            assert not any(found[name][span].any() for name in found if name == "out" or name.startswith("grad"))


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "decay", "scan"])
def test_the_definition_against_dense_matrices(kind):
    case = problem(kind, 1, 70)  # two segments of the backward
    leaves = [*case.tokens.values(), case.state]
    for leaf in leaves:
        leaf.requires_grad_()
    out, final = whole(case, ((70,),), continued=True)
    wanted = torch.autograd.grad((out, final), leaves, (torch.ones_like(out), torch.ones_like(final)))
    recurrence = Recurrence(kind, 4**-0.5, normalize=kind != "decay")
    flat = tuple(t.detach()[0] for t in case.tokens.values())
    scan = ReferenceKernel().prepare(recurrence, flat, Pieces((0, 70), waiting=(0,), exporting=(0,)))
    state = case.state.detach()
    transitions, ends = (t[0] for t in recurrence.summary_views(flat, scan.summary(Slots((0,), 1))))
    torch.testing.assert_close(recurrence.advance(transitions, state[0], ends, backward=False), final[0].detach())
    torch.testing.assert_close(scan.forward(state), out[0].detach())
    grad, end = torch.ones_like(out[0]), torch.ones_like(state)
    for ours, theirs in zip(scan.backward(state, grad, end), wanted, strict=False):
        torch.testing.assert_close(ours, theirs[0])
    through = recurrence.advance(transitions, end[0], scan.start_gradients(grad, Slots((0,), 1))[0], backward=True)
    torch.testing.assert_close(through, wanted[-1][0])


@pytest.mark.parametrize(
    ("found", "capability", "words"),
    [
        ({}, (8, 0), ("triton", "pip install")),
        ({"triton": (3, 7, 1)}, (7, 5), ("8.0", "reference")),
        ({"triton": (3, 7, 0)}, (9, 0), ("Triton 3.7.0", "Hopper", "3.6", "3.7.1", "torch 2.13")),
        ({"triton": (3, 5, 1)}, (9, 0), ("Triton 3.5.1", "Hopper")),
        ({"triton": (3, 6, 0)}, (9, 0), None),
        ({"triton": (3, 5, 1)}, (8, 0), None),
        ({"triton": (3, 7, 1)}, (9, 0), None),
        ({"triton": (3, 8, 0)}, (9, 0), None),
    ],
)
def test_versions_are_checked_before_forward(found, capability, words):
    reason = unusable(capability, AnotherMachine(installed=found))
    assert (reason is None) == (words is None)
    assert words is None or all(word in " ".join(reason) for word in words)


def test_a_kernel_by_name_says_why_it_cannot_run():
    given = low(Recurrence("decay"), inputs("decay", 0.1)[0], "cpu")
    with pytest.raises(KernelError, match="it needs a GPU"):
        select_kernel("triton", Recurrence("decay"), given)
    assert select_kernel("auto", Recurrence("decay"), given).name == "reference"


def test_fragments_cover_the_pieces():
    """Fragments begin at multiples of a chunk of their piece, and are about as long as each other."""
    edges, by_piece = fragments((0, 190, 230, 240), 64)
    assert (edges, by_piece) == ((0, 64, 128, 190, 230, 240), (0, 3, 4, 5))
    assert fragments((0, 64, 500), 200) == ((0, 64, 320, 500), (0, 1, 3))
    assert fragments((0, 30, 260), 1000) == ((0, 30, 260), (0, 1, 2))


def test_pieces_of_one_fragment_without_states_are_not_folded():
    plan = make_plan(Pieces((0, 60, 252, 262, 292), waiting=(2,), exporting=(1,)), 64)
    assert plan.edges == (0, 60, 124, 188, 252, 262, 292)
    assert (plan.folded, plan.places, plan.by_piece) == (2, (1, 2, 3, 4), (0, 3, 4))
    assert (plan.waiting, plan.exporting) == ((1,), (0,))
    assert (plan.unread, plan.unread_matrices, plan.unread_gradients) == ((4,), (4,), (1,))
    assert make_plan(Pieces((0, 192)), 64)[-3:] == ((2,), (0, 2), (0,))
    assert make_plan(Pieces((0, 60, 100)), 64).places == ()


def test_fragments_fill_a_gpu():
    assert [fragment_tokens("kda", 65_536, heads, 128, 132) for heads in (32, 8)] == [32_768, 8_192]
    assert fragment_tokens("gated_delta", 65_536, 32, 128, 132) == 16_384  # two programs a multiprocessor
    assert fragment_tokens("kda", 2_048, 4, 64, 132) == 4_096
    assert fragment_tokens("kda", 65_536, 4096, 128, 132) == 65_536
