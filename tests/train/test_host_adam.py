"""AdamW in host memory is torch's in fp64, 16-bit weights are the nearest ones, and copies wait for each other."""

import contextlib
import itertools

import numpy as np
import pytest
import torch

from bmburst_ops.host_adamw import Rates
from tests import lazy
from tests.copies import FromElsewhere
from tests.distributed.programs import on_program
from tests.refusals import refused
from tests.train.lazy_streams import late_copies

RATES = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-3}
SCALE = 8  # a power of 2: exact
SIZES = (1, 0, 64, 65, 1000, 193)  # of pieces of 64: none, one, several, and one that is not full
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@on_program(1)
def test_in_one_process():
    check_the_nearest()
    check_the_last_bit()
    alone = None
    for (piece, depth), late in itertools.product([(1 << 22, 3), (64, 3), (64, 1), (128, 2)], (False, True)):
        with late_copies() if late else contextlib.nullcontext():
            found = against_torch(piece, depth)
        alone = alone or found
        for ours, wanted in zip(found, alone, strict=True):  # pieces and their number change no bit
            assert torch.equal(ours, wanted), (piece, depth, late)
    check_what_is_skipped()
    with pytest.raises(ValueError, match="piece 65"):
        host_adam(65, 3)
    check_loss_scale()
    check_state_dicts()


@pytest.mark.parametrize("shape", [(0,), (10, 2), (13,)])
@on_program(1)
def test_masters_come_in_pieces(shape):
    """The host needs memory for one piece of 16-bit weights at a time."""
    from bmburst.optim import states

    weights = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with pytest.MonkeyPatch.context() as patch, FromElsewhere() as seen:
        patch.setattr(states, "_AT_ONCE", 5)
        made = states.initial_state(weights, torch.device("cpu"), "float32", states.part_of_all(weights.numel(), ""))
    count, master, sizes = weights.numel(), made[states.MASTER], [size for size, *_ in seen.copies]
    assert sum(sizes) == count and max(sizes, default=0) <= 5
    assert torch.equal(master, torch.arange(1.0, count + 1).view(shape)) and master.dtype == torch.float32


def host_adam(piece, depth):
    return lazy.HostAdam(piece=piece, depth=depth)


def state_of(weights):
    state = {"step": 0, "exp_avg": torch.zeros(len(weights)), "exp_avg_sq": torch.zeros(len(weights))}
    return state if weights.dtype == torch.float32 else state | {"_param_fp32": weights.float()}


def update(weights, gradient, state, **changes):
    from bmburst.optim.states import part_of_all
    from bmburst.optim.updates import Update

    parts, rates = part_of_all(weights.numel(), ""), Rates(**{"weight_decay": 0.0, **RATES, **changes})
    return Update(weights=weights, gradient=gradient, state=state, parts=parts, rates=rates)


def against_torch(piece, depth):
    """Compare with torch's AdamW in fp64; return all weights and states."""
    ours, generator = host_adam(piece, depth), torch.Generator().manual_seed(3)
    cases = [(size, dtype) for dtype in DTYPES for size in SIZES]
    weights = [torch.randn(size, generator=generator).to(dtype) for size, dtype in cases]
    exact = [torch.nn.Parameter(w.double()) for w in weights]
    states = [state_of(w) for w in weights]
    decays = [0.5 * (number % 2) for number in range(len(cases))]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(exact, decays, strict=True)]
    expected = torch.optim.AdamW(groups, **RATES)
    for step in range(4):
        for group in groups:
            group["lr"] = RATES["lr"] / (step + 1)
        rates = {"lr": RATES["lr"] / (step + 1)}
        for group in expected.param_groups:
            group.update(rates)
        gradients = [torch.randn(len(w), generator=generator).to(w.dtype) for w in weights]
        for parameter, gradient in zip(exact, gradients, strict=True):
            parameter.grad = gradient.double() / SCALE
        expected.step()
        before = [gradient.clone() for gradient in gradients]
        parts = zip(weights, gradients, states, decays, strict=True)
        ours.step([update(w, g, s, weight_decay=decay, **rates) for w, g, s, decay in parts], SCALE)
        assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True))
        for w, parameter, state in zip(weights, exact, states, strict=True):
            master = state.get("_param_fp32", w)
            torch.testing.assert_close(master.double(), parameter.detach(), rtol=1e-6, atol=1e-6)
            moments = expected.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name].double(), moments[name], rtol=1e-6, atol=1e-8)
            assert state["step"] == step + 1
            assert torch.equal(w, master.to(w.dtype))
    return [*weights, *(state[name] for state in states for name in sorted(state) if name != "step")]


def check_the_nearest():
    """Between two bf16 numbers, an even last bit wins; so it does for negatives and subnormals."""
    ulp, tiny = 2.0**-7, 2.0**-133  # of 1, and the smallest number above 0
    table = [
        *[(1 + ulp / 2, 1.0), (1 + 3 * ulp / 2, 1 + 2 * ulp), (1 + 5 * ulp / 2, 1 + 2 * ulp), (-1 - ulp / 2, -1.0)],
        *[(-1 - 3 * ulp / 2, -1 - 2 * ulp), (1 + ulp / 2 + 2.0**-23, 1 + ulp), (1 + ulp / 2 - 2.0**-23, 1.0)],
        *[(tiny / 2, 0.0), (3 * tiny / 2, 2 * tiny), (-3 * tiny / 2, -2 * tiny), (-tiny / 2, 0.0), (tiny, tiny)],
        *[(2 - ulp / 2, 2.0), (2.0**-126 - tiny / 2, 2.0**-126), (3.4028234e38, float("inf"))],
    ]
    given, wanted = (torch.tensor(column, dtype=torch.float64) for column in zip(*table, strict=True))
    assert rounded(given.float(), torch.bfloat16).double().tolist() == wanted.tolist()
    bits = torch.randint(-(2**31), 2**31, (4099,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    numbers = bits.view(torch.float32)
    numbers = numbers[numbers.isfinite()]
    even = (numbers.view(torch.int32).numpy().view(np.uint32) >> 16) & 1
    by_integers = (numbers.view(torch.int32).numpy().view(np.uint32) + np.uint32(0x7FFF) + even) >> 16
    ours = rounded(numbers, torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, by_integers.astype(np.uint16))
    halves = torch.cat((numbers, torch.randn(999) * 1e-6, torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0])))
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded(halves, torch.float16).numpy(), halves.numpy().astype(np.float16))


def check_the_last_bit():
    """fp32 moments are torch's but for a last bit; weights are off by what an update rounded otherwise leaves."""
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(5003, generator=generator)
    parameter, state, ours = torch.nn.Parameter(weights.clone()), state_of(weights), host_adam(1024, 2)
    reference = torch.optim.AdamW([parameter], **RATES, weight_decay=0.5, foreach=False)
    for _ in range(5):
        before = weights.copy_(parameter.detach()).clone()
        parameter.grad = torch.randn(5003, generator=generator)
        ours.step([update(weights, parameter.grad, state, weight_decay=0.5)])
        reference.step()
        wanted, moments = parameter.detach(), reference.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            assert ((state[name] - moments[name]).abs() <= 2.0**-23 * moments[name].abs()).all()
            state[name].copy_(moments[name])  # each step is seen by itself
        larger = torch.maximum(before.abs(), (wanted - before).abs())
        assert ((weights - wanted).abs() <= 4 * 2.0**-23 * larger).all()


def rounded(master, dtype):
    """Return the weights that come of a step which leaves their master as it is."""
    weights = torch.zeros(len(master), dtype=dtype)
    state = state_of(weights) | {"_param_fp32": master.clone()}
    host_adam(64, 2).step([update(weights, torch.zeros_like(weights), state, lr=0.0)])
    assert torch.equal(state["_param_fp32"], master)
    return weights


def make(offload, dtype, size=130, **options):
    """Return the optimizer of two parameters, one of which gets no gradient."""
    parameters = [torch.nn.Parameter(torch.linspace(-2, 2, size).to(dtype)) for _ in range(2)]
    return lazy.AdamW(parameters, **RATES, weight_decay=0.1, offload=offload, **options), parameters[0]


def give(parameter, seed):
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def check_what_is_skipped():
    optimizer, parameter = make(True, torch.bfloat16)
    idle = optimizer.param_groups[0]["params"][1]
    before = idle.detach().clone()
    give(parameter, 0)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(idle, before) and list(optimizer.state) == [parameter]
    host_adam(64, 2).step([])


def check_loss_scale():
    """A gradient that overflows changes nothing but the scale, and the scale nothing but the range of gradients."""
    for dtype, offload in itertools.product((torch.float16, torch.bfloat16), (True, False)):
        (ours, parameter), (plain, wanted) = make(offload, dtype), make(offload, dtype)
        manager = lazy.bmt.optim.OptimManager(loss_scale=64.0)
        manager.add_optimizer(ours)
        for step in range(3):
            give(wanted, step)
            plain.step()
            if step == 1:
                before = [
                    parameter.detach().clone(),
                    *(ours.state[parameter][n].clone() for n in ("exp_avg", "exp_avg_sq")),
                ]
                parameter.grad = torch.full_like(parameter, float("inf"))
                manager.step()
                after = [parameter.detach(), *(ours.state[parameter][n] for n in ("exp_avg", "exp_avg_sq"))]
                assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
                assert manager.loss_scale == 32 and ours.state[parameter]["step"] == 1
            parameter.grad = wanted.grad * manager.loss_scale
            manager.step()
            assert torch.equal(parameter, wanted)


def check_state_dicts():
    """torch's own way to save a state: between optimizers with and without offload, bit by bit."""

    for dtype, first, then in itertools.product(DTYPES, (False, True), (False, True)):
        (one, source), (other, target) = make(first, dtype), make(then, dtype)
        give(source, 0)
        one.step()
        saved = one.state_dict()
        other.load_state_dict(saved)
        target.data.copy_(source.data)
        for name, value in one.state[source].items():
            assert torch.equal(torch.as_tensor(other.state[target][name]), torch.as_tensor(value)), (dtype, name)
        held = one.state[source]["exp_avg"].clone()
        give(target, 1)
        other.step()
        assert other.state[target]["step"] == 2
        assert torch.equal(one.state[source]["exp_avg"], held)  # the other has a copy
    (theirs, source), (ours, _) = make(False, torch.float16, kernel="bmtrain"), make(False, torch.float16)
    give(source, 0)
    theirs.step()
    assert theirs.state[source]["exp_avg"].dtype == torch.float16
    with refused("exp_avg", "fp16", "loss", "kernel"):
        ours.load_state_dict(theirs.state_dict())
