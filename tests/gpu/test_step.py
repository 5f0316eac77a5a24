"""On a real GPU: head and loss in groups of chunks, their memory, and AdamW's kernel beside BMTrain's own."""

from dataclasses import replace

import pytest
import torch

from bmburst.blocks.presets import PRESETS
from bmburst.loss import token_logprobs
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import CURRENT
from bmburst.plan.memory import memory_of
from bmburst.schedule.hardware import load_hardware
from bmburst_ops.linear_cross_entropy import linear_cross_entropy
from tests import lazy
from tests.distributed.programs import on_program
from tests.gpu.test_recompute import make, use

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gathered", [None, 1, 3])
def test_groups_of_chunks_are_all_logits_at_once(gathered):
    """bf16 on tensor cores, 1,001 tokens in chunks of 96: the last group and its last chunk are not full."""
    generator = torch.Generator("cuda").manual_seed(1)
    hidden, weight = (torch.randn(n, 256, device="cuda", generator=generator).bfloat16() for n in (1001, 1003))
    labels = torch.randint(1003, (1001,), device="cuda", generator=generator)
    labels[::5], hidden[0] = -100, torch.nan
    leaves = hidden.requires_grad_(), (weight / 16).requires_grad_()
    exact = [leaf.detach().double().nan_to_num().requires_grad_() for leaf in leaves]
    loss = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    ours = linear_cross_entropy(*leaves, labels, chunk=96, gathered=gathered)
    torch.testing.assert_close(ours.double(), loss, rtol=1e-5, atol=0)
    for found, wanted in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(loss, exact), strict=True):
        # Gradients of logits are rounded to bf16 before they are multiplied, results once more.
        assert (found.double() - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**-12)])
def test_logprobs_with_factors_of_their_own(dtype, scale):
    """On tensor cores; factors of a mean over many tokens must not be lost in fp16."""
    generator = torch.Generator("cuda").manual_seed(2)
    hidden, weight = (torch.randn(n, 256, device="cuda", generator=generator).to(dtype) for n in (1001, 1003))
    labels = torch.randint(1003, (1001,), device="cuda", generator=generator)
    factors = torch.randn(1001, device="cuda", generator=generator) * scale
    leaves = hidden.requires_grad_(), (weight / 16).requires_grad_()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.log_softmax(exact[0] @ exact[1].t(), -1).gather(-1, labels[:, None])[:, 0]
    ours = token_logprobs(*leaves, labels, chunk=96)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(ours, leaves, factors)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, factors.double()), strict=True):
        assert (one.double() - other).norm() < 2**-7 * other.norm()


def test_the_loss_takes_the_memory_of_its_formula():
    tokens, words, features, chunk = 8192, 128256, 1024, 1024
    hidden, weight = (torch.randn(n, features, device="cuda").bfloat16().requires_grad_() for n in (tokens, words))
    labels = torch.randint(words, (tokens,), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    sums = 4 * weight.numel() + hidden.nbytes  # the gradients
    group = chunk * CURRENT.gathered_chunks(2)
    expected = sums + words * CURRENT.loss_alive(2, chunk, tokens) + group * features * hidden.itemsize
    assert peak == pytest.approx(expected, rel=0.05)


@on_program(1, on_gpus=True, seconds=300)
def test_peaks_that_are_the_losses():
    tokens = 8192
    config = replace(PRESETS["llama-3-8b"], num_layers=2, max_position_embeddings=tokens)
    _, model = make(config)
    ids = torch.randint(config.vocab_size, (1, tokens + 1)).cuda()
    positions = torch.arange(tokens, device="cuda")[None]
    for policy in ("none", "block-keep-attention"):
        use(model, policy)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            (model.loss(ids[:, :-1], positions, ids[:, 1:]) / tokens).backward()
            torch.cuda.synchronize()
        task = Task(model=config, sequence=tokens, gpus=1)
        way = Candidate(task=task, recompute=policy)
        predicted = memory_of(way, load_hardware("h200"))
        assert predicted.moment == "loss"
        without_optimizer = predicted.allocated - predicted.lines["optimizer"]
        assert without_optimizer == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05), policy


@on_program(1, on_gpus=True)
def test_adamws_kernel_is_bmtrains():
    from bmburst.optim.adamw import KERNELS

    made = {}
    for kernel in KERNELS:
        generator = torch.Generator().manual_seed(2)
        parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16().cuda()) for n in (1, 4099)]
        rates = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}
        made[kernel] = lazy.AdamW(parameters, **rates, kernel=kernel), parameters
    for step in range(5):
        for optimizer, parameters in made.values():
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().cuda()
            optimizer.step(scale=4)
        (ours, parameters), (theirs, others) = made["auto"], made["bmtrain"]
        for p, like in zip(parameters, others, strict=True):
            for name in ("exp_avg", "exp_avg_sq", "_param_fp32"):
                torch.testing.assert_close(ours.state[p][name], theirs.state[like][name], rtol=1e-6, atol=1e-7)
            assert ours.state[p]["step"] == theirs.state[like]["step"] == step + 1
            assert torch.equal(p.detach(), ours.state[p]["_param_fp32"].bfloat16())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 700}, {"packed": True}], ids=str)
@on_program(1, on_gpus=True, seconds=300)
def test_kernels_are_compiled_ahead(options):
    """A block after `compile_ahead` compiles no kernel of attention, and no error hides in its thread."""
    from bmburst.blocks import transformer
    from bmburst.schedule.documents import Documents
    from bmburst.schedule.mask import SlidingWindow
    from bmburst_ops.machine import version_of

    packed = options.pop("packed", False)
    model = replace(PRESETS["llama-tiny"], head_dim=64, num_heads=8, num_kv_heads=2, **options)
    sizes = model.num_heads, model.num_kv_heads, model.head_dim, torch.bfloat16
    attention = lazy.BurstAttention()
    attention.compile_kernels(*sizes, window=model.sliding_window, packed=packed)
    transformer._run_elementwise(model, torch.bfloat16)
    if version_of("flash-attn-4") is None:
        return
    from flash_attn.cute.interface import _bwd_postprocess_convert, _bwd_preprocess, _flash_attn_bwd, _flash_attn_fwd

    caches = [f.compile_cache for f in (_flash_attn_fwd, _flash_attn_bwd, _bwd_preprocess, _bwd_postprocess_convert)]
    compiled = [len(cache.cache) for cache in caches]
    assert all(compiled), compiled
    q = torch.randn(1, 4096, model.num_heads, model.head_dim, device="cuda").bfloat16().requires_grad_()
    k = torch.randn(1, 4096, model.num_kv_heads, model.head_dim, device="cuda").bfloat16().requires_grad_()
    window = model.sliding_window
    mask = Documents((1000, 3096)) if packed else "causal" if window is None else SlidingWindow(window)
    attention(q, k, k, None, mask).sum().backward()
    assert [len(cache.cache) for cache in caches] == compiled
