"""AdamW's moments in bfloat16 and 8 bits: C, torch and Triton agree, and follow fp64 where bf16 to nearest stalls."""

from itertools import pairwise

import pytest
import torch

from bmburst_ops.host_adamw import Rates, adamw_, joined, split
from bmburst_ops.moments import (
    BLOCK,
    Rounding,
    aligned,
    blocks_of,
    decoded,
    encode_,
    key_of,
    part_of,
    random_bits,
    table,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATES = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.5}
SCALE = 8.0
KINDS = {"bfloat16": torch.bfloat16, "8bit": torch.uint8}
SIGNED = (True, False)


class Moments:
    """The two moments of a run of elements that begins at `first`."""

    def __init__(self, kind, count, first=0, device="cpu"):
        self.first, self.numbers = first, [torch.zeros(count, dtype=KINDS[kind], device=device) for _ in SIGNED]
        of_blocks = [torch.zeros(blocks_of(first, count), device=device) for _ in SIGNED]
        self.scales = tuple(of_blocks) if kind == "8bit" else None

    def rounding(self, step):
        return Rounding(first=self.first, key=key_of(7, step), scales=self.scales)

    def wide(self):
        scales = self.scales or (None, None)
        return [
            decoded(*of, self.first, signed=signed) for *of, signed in zip(self.numbers, scales, SIGNED, strict=True)
        ]


def step_of(kernel, weights, master, remainder, gradient, moments, step, rates=RATES, **options):
    """Take a step with a kernel."""
    if kernel == "triton":
        from bmburst_ops import triton_moments

        triton_moments.adamw_(
            *(weights, gradient, tuple(moments.numbers), moments.rounding(step)),
            **rates,
            step=step,
            scale=SCALE,
            master=master,
            remainder=remainder,
        )
        return
    asked = Rates(**rates)
    adamw_(
        *(weights, gradient, tuple(moments.numbers), asked),
        step=step,
        scale=SCALE,
        master=master,
        remainder=remainder,
        rounding=moments.rounding(step),
        kernel=kernel,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_and_stay_near_fp64(kind, dtype):
    """From an element inside a block; each kernel has the same random numbers, so they differ by last bits only."""
    count, first = 1500, 1021
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(count, generator=generator).to(dtype)
    exact = torch.nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], **RATES)
    made = {}
    for kernel in ("c", "torch", "triton"):
        device = DEVICE if kernel == "triton" else "cpu"
        weights = start.to(device, copy=True)
        master = weights.float() if dtype == torch.float16 else None
        remainder = torch.zeros(count, dtype=torch.int16, device=device) if dtype == torch.bfloat16 else None
        made[kernel] = weights, master, remainder, Moments(kind, count, first, device)
    for step in range(1, 7):
        gradient = torch.randn(count, generator=generator).to(dtype)
        exact.grad = gradient.double() / SCALE
        reference.step()
        for kernel, (weights, master, remainder, moments) in made.items():
            given = gradient.to(weights.device, copy=True)
            step_of(kernel, weights, master, remainder, given, moments, step)
            assert torch.equal(given.cpu(), gradient)
    found = {}
    for kernel, (weights, master, remainder, moments) in made.items():
        wide = joined(weights, remainder) if remainder is not None else weights.float() if master is None else master
        found[kernel] = [each.cpu() for each in (wide, *moments.wide())]
        if master is not None:
            assert ((weights - master).abs() <= 2.0**-10 * master.abs()).all()
        if remainder is not None:
            nearest, rest = torch.empty_like(weights), torch.empty_like(remainder)
            split(wide, nearest, rest)
            assert torch.equal(nearest, weights)
    for kernel in ("torch", "triton"):
        for ours, others in zip(found["c"], found[kernel], strict=True):
            near = (ours - others).abs() <= 1e-5 * others.abs() + 1e-8
            assert near.float().mean() > 0.99, kernel  # a last bit decides a rounding now and then
    mean, square = (reference.state[exact][name] for name in ("exp_avg", "exp_avg_sq"))
    few = 2.0**-7 if kind == "bfloat16" else 0.1  # of a number: the step of its format
    for ours, wanted in zip(found["c"], (exact.detach(), mean, square), strict=True):
        assert (ours - wanted).norm() / wanted.norm() < few


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_changes_what_it_divides(kind):
    """bf16 nowhere; 8 bits in the blocks at a cut, whose pieces have a scale each."""
    count = 3000
    generator = torch.Generator().manual_seed(2)
    start, gradients = torch.randn(count, generator=generator), torch.randn(3, count, generator=generator)
    results = []
    for cuts in ((0, count), (0, 1, 700, 700, 1500, count)):
        weights, numbers = start.clone(), [[], []]
        for begin, end in pairwise(cuts):
            moments = Moments(kind, end - begin, begin)
            for step, gradient in enumerate(gradients, 1):
                step_of("auto", weights[begin:end], None, None, gradient[begin:end], moments, step)
            for found, wide in zip(numbers, moments.wide(), strict=True):
                found.append(wide)
        results.append([weights, *(torch.cat(each) for each in numbers)])
    touched = {0, 700 // BLOCK, 1500 // BLOCK} if kind == "8bit" else set()
    outside = torch.tensor([i // BLOCK not in touched for i in range(count)])
    for whole, cut in zip(*results, strict=True):
        assert torch.equal(whole[outside], cut[outside])
        assert torch.equal(whole, cut) == (not touched)


def test_pieces_are_those_of_the_whole():
    """fp16 weights are updated in pieces, which no block is cut by; and no random number depends on them."""
    assert [(run.start, run.stop) for run in aligned(1000, 300, 512)] == [(0, 212), (212, 724), (724, 1000)]
    assert aligned(0, 5, 256) == []
    results = []
    for piece in (1 << 20, 512):
        weights, moments = torch.linspace(-1, 1, 1000).half(), Moments("8bit", 1000, 300)
        for step in (1, 2):
            step_of("c", weights, weights.float(), None, weights.sin(), moments, step, piece=piece)
        results.append((weights, *moments.numbers, *moments.scales))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    rounding = moments.rounding(1)
    assert [len(each) for each in part_of(rounding, slice(212, 1000)).scales] == [4, 4]


def test_the_table_is_that_of_the_field():
    """The dynamic map of bitsandbytes (functional.py, create_dynamic_map): some of its numbers, and how many."""
    signed, unsigned = (table(torch.device("cpu"), signed=signed) for signed in SIGNED)
    for numbers in (signed, unsigned):
        assert len(numbers) == 256 and (numbers.diff() > 0).all() and numbers[-1] == 1
    assert (signed[127], unsigned[0]) == (0, 0)
    assert signed[[0, 126, 128, 254]].tolist() == pytest.approx([-0.9929688, -5.5e-7, 5.5e-7, 0.9929688], rel=1e-6)
    assert unsigned[[1, 2, 254]].tolist() == pytest.approx([3.25e-7, 7.75e-7, 0.9964844], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_right_on_average_and_reads_what_it_wrote(kind):
    values = torch.cat((torch.randn(400, generator=torch.Generator().manual_seed(3)) * 1e-3, torch.zeros(5)))
    for signed in SIGNED:
        numbers = values if signed else values.abs()
        total, drawn = torch.zeros(405, dtype=torch.float64), 400
        for draw in range(drawn):
            moments = Moments(kind, 405)
            scales = moments.scales[0] if moments.scales else None
            noise = random_bits(0, 405, key_of(1, draw), values.device) & 0xFFFF
            encode_(moments.numbers[0], scales, numbers, 0, noise, signed=signed)
            read = decoded(moments.numbers[0], scales, 0, signed=signed)
            total += read
            if draw == 0:
                again = Moments(kind, 405)
                encode_(again.numbers[0], again.scales[0] if scales is not None else None, read, 0, None, signed=signed)
                assert torch.equal(again.numbers[0], moments.numbers[0])
        largest = numbers.abs().max()
        wide = 2.0**-7 * numbers.abs() if kind == "bfloat16" else 0.015 * largest  # the widest step of the table
        assert ((total / drawn - numbers).abs() <= 5 * wide / 2 / drawn**0.5 + 1e-12).all()
        assert not total[400:].any()
    few = torch.full((BLOCK,), 1e-12)
    few[0] = 1.0
    moments = Moments("8bit", BLOCK)
    encode_(moments.numbers[1], moments.scales[1], few, 0, torch.zeros(BLOCK, dtype=torch.int64), signed=False)
    assert (decoded(moments.numbers[1], moments.scales[1], 0, signed=False) > 0).all()


def test_tiny_second_moments_follow_fp64_for_2000_steps():
    """beta2 0.999 moves a moment by 0.1 % a step: rounded to nearest, bf16 keeps what it has, and weights stall."""
    count, steps, rates = 1024, 2000, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 0.0}
    generator = torch.Generator().manual_seed(4)
    exact = torch.nn.Parameter(torch.zeros(count, dtype=torch.float64))
    reference = torch.optim.AdamW([exact], **rates)
    kept = {kind: (torch.zeros(count), Moments(kind, count)) for kind in KINDS}
    naive, of_naive = torch.zeros(count), Moments("bfloat16", count)
    for step in range(1, steps + 1):
        # Large at first; then 5 % of it.
        gradient = (torch.randn(count, generator=generator) + 0.5) * (1e-7 if step <= 50 else 5e-9)
        exact.grad = gradient.double()
        reference.step()
        for weights, moments in kept.values():
            step_of("auto", weights, None, None, gradient * SCALE, moments, step, rates)
        wide = of_naive.wide()
        adamw_(naive, gradient, tuple(wide), Rates(**rates), step=step)
        for stored, values in zip(of_naive.numbers, wide, strict=True):
            stored.copy_(values)
    square = reference.state[exact]["exp_avg_sq"]
    for kind, (weights, moments) in kept.items():
        ratio = moments.wide()[1].double() / square
        assert 0.98 < ratio.mean() < 1.02, kind
        assert (weights - exact).norm() / exact.norm() < 0.05, kind
    stuck = of_naive.wide()[1].double() / square
    assert stuck.mean() > 4 and (naive - exact).norm() / exact.norm() > 0.2
