"""The stand-in for `bmtrain.C`: every function BMTrain calls, and the numbers of its kernels."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bmburst.host.cuda import Streams
from bmburst.host.extension import build_extension
from bmburst.host.nccl import Nccl, Rendezvous

LOW = [("fp16", torch.float16), ("bf16", torch.bfloat16)]
C = build_extension(Nccl(Streams(), Rendezvous({})))


def test_every_function_that_bmtrain_calls_is_there() -> None:
    found = importlib.util.find_spec("bmtrain")
    sources = sorted(Path(found.origin).parent.rglob("*.py"))
    called = {name for path in sources for name in re.findall(r"\bC\.(\w+)", path.read_text()) if name != "exp"}
    assert len(called) == 31, "BMTrain 1.0.1 calls 31 functions of its extension"
    assert [name for name in sorted(called) if not callable(getattr(C, name, None))] == []


@pytest.mark.parametrize(("suffix", "dtype"), LOW)
def test_casts_round_to_nearest_even(suffix: str, dtype: torch.dtype) -> None:
    one, ulp = 1.0, torch.finfo(dtype).eps
    source = torch.tensor([one + 0.51 * ulp, one + 0.5 * ulp, one + 1.5 * ulp, -one - 0.51 * ulp, torch.inf, -0.0])
    target = torch.zeros(6, dtype=dtype)
    getattr(C, f"to_{suffix}_from_fp32")(6, source.data_ptr(), target.data_ptr())
    assert target.tolist() == [one + ulp, one, one + 2 * ulp, -one - ulp, torch.inf, 0.0]


@pytest.mark.parametrize(("suffix", "dtype"), LOW)
def test_overflow_is_seen_and_never_forgotten(suffix: str, dtype: torch.dtype) -> None:
    out = torch.zeros(3, dtype=torch.uint8)
    check = getattr(C, f"has_nan_inf_{suffix}_launcher")
    for bad in (torch.inf, -torch.inf, torch.nan):
        numbers = torch.zeros(2_001, dtype=dtype)
        out.zero_()
        check(2_001, numbers.data_ptr(), 0, out[1:].data_ptr(), 0)
        assert out.tolist() == [0, 0, 0]
        numbers[2_000] = bad
        check(2_000, numbers.data_ptr(), 0, out[1:].data_ptr(), 0)
        assert out.tolist() == [0, 0, 0]
        check(2_001, numbers.data_ptr(), 0, out[1:].data_ptr(), 0)
        assert out.tolist() == [0, 1, 0]
        check(2_000, numbers.data_ptr(), 0, out[1:].data_ptr(), 0)
        assert out.tolist() == [0, 1, 0]


def reference_adam(p: Tensor, grads: list[Tensor], lr: float, decay: float) -> Tensor:
    """torch's own AdamW in fp64."""
    parameter = torch.nn.Parameter(p.double())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay)
    for grad in grads:
        parameter.grad = grad.double()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("kernel", ["adam", "adam_cpu"])
@pytest.mark.parametrize(("suffix", "dtype"), LOW)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(kernel: str, suffix: str, dtype: torch.dtype, decay: float) -> None:
    count, scale, lr, steps = 1_003, 64.0, 0.01, 5
    scaled = kernel == "adam" and dtype == torch.float16  # moments in fp16, times the scale
    torch.manual_seed(1)
    start, grads = torch.randn(count), [torch.randn(count).mul(0.1) for _ in range(steps)]
    low_grads = [(g * scale).to(dtype) for g in grads]
    p, p_low = start.clone(), torch.zeros(count, dtype=dtype)
    m, v = torch.zeros(count, dtype=torch.float16 if scaled else torch.float32), torch.zeros(count)
    for step, grad in enumerate(low_grads, 1):
        pointers = [p.data_ptr(), p_low.data_ptr(), grad.data_ptr(), m.data_ptr(), v.data_ptr()]
        end: list[int] = [0]
        if kernel == "adam_cpu":
            pointers.insert(2, 0)
            end = []
        numbers = (0.9, 0.98, 1e-6, lr, scale, decay, 1 - 0.9**step, 1 - 0.98**step)
        getattr(C, f"{kernel}_{suffix}_launcher")(count, *pointers, *numbers, *end)
    expected = reference_adam(start, [g.double() / scale for g in low_grads], lr, decay)
    # The fp16 kernel rounds its first moment at every step, to 2**-11 of itself: lr * steps * 2**-11 at most.
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=lr * steps * 2**-11 if scaled else 2e-6)
    assert torch.equal(p_low, p.to(dtype))


def test_adam_reports_its_updates() -> None:
    torch.manual_seed(2)
    p, g, low, info = torch.randn(77), torch.randn(77).half(), torch.zeros(77).half(), torch.zeros(4)
    before, m, v = p.clone(), torch.zeros(77), torch.zeros(77)
    pointers = [t.data_ptr() for t in (p, low, info, g, m, v)]
    C.adam_cpu_fp16_launcher(77, *pointers, 0.9, 0.98, 1e-6, 0.01, 1.0, 0.1, 0.1, 0.02)
    update = (before - p) / 0.01
    expected = torch.stack([update.mean(), update.var(correction=0), update.sum(), update.square().sum()])
    torch.testing.assert_close(info, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("suffix", "dtype"), LOW)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 37), (3, 1_500_001)], ids=str)
def test_cross_entropy_is_torchs(suffix: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    torch.manual_seed(3)
    logits = (3 * torch.randn(rows, columns)).to(dtype)
    targets = torch.randint(0, columns, (rows,)).int()
    if rows > 1:
        targets[rows // 2] = -100
    softmax, losses = torch.empty_like(logits), torch.empty(rows)
    pointers = [t.data_ptr() for t in (logits, targets, softmax, losses)]
    getattr(C, f"cross_entropy_forward_{suffix}_launcher")(rows, columns, *pointers, -100, 0)
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets.long(), reduction="none")
    torch.testing.assert_close(losses, expected.detach().float(), rtol=1e-6, atol=1e-5)

    weights = torch.randn(rows) * (targets != -100)  # as BMTrain: an ignored row has no incoming gradient
    expected.backward(weights.double())
    pointers = [t.data_ptr() for t in (weights, targets, softmax)]
    getattr(C, f"cross_entropy_backward_inplace_{suffix}_launcher")(rows, columns, *pointers, -100, 0)
    error = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(softmax.double(), leaf.grad, rtol=error, atol=error if rows * columns < 1000 else 1e-6)


def test_a_row_of_minus_infinity_is_not_nan() -> None:
    logits, softmax, losses = torch.full((1, 3), -torch.inf).half(), torch.ones(1, 3).half(), torch.ones(1)
    target = torch.tensor([-100], dtype=torch.int32)
    C.cross_entropy_forward_fp16_launcher(
        1, 3, logits.data_ptr(), target.data_ptr(), softmax.data_ptr(), losses.data_ptr(), -100, 0
    )
    assert softmax.tolist() == [[0.0, 0.0, 0.0]]
    assert losses.tolist() == [0.0]


@pytest.mark.parametrize("bad", [3, -1])
def test_a_target_out_of_range_is_an_error(bad: int) -> None:
    logits, losses = torch.zeros(2, 3).half(), torch.zeros(2)
    target = torch.tensor([0, bad], dtype=torch.int32)
    with pytest.raises(IndexError, match=rf"target {bad} is out of range: 3 classes"):
        C.cross_entropy_forward_fp16_launcher(
            2, 3, logits.data_ptr(), target.data_ptr(), logits.data_ptr(), losses.data_ptr(), -100, 0
        )


@pytest.mark.parametrize(("suffix", "dtype"), LOW)
def test_softmax_of_a_vocabulary_in_parts(suffix: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits = torch.randn(7, 33).to(dtype)
    largest, total, kept = logits.float().amax(1) + 1, torch.empty(7), logits.clone()
    getattr(C, f"fused_sumexp_{suffix}_launcher")(7, 33, logits.data_ptr(), largest.data_ptr(), total.data_ptr(), 0)
    torch.testing.assert_close(total, (kept.float() - largest[:, None]).exp().sum(1))
    getattr(C, f"fused_softmax_inplace_{suffix}_launcher")(
        7, 33, logits.data_ptr(), largest.data_ptr(), total.data_ptr(), 0
    )
    torch.testing.assert_close(logits, torch.softmax(kept.float(), 1).to(dtype))
