"""What attention refuses: on every rank, in one clear message, before any work starts."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import bmburst
from bmburst.comm.groups import single_rank_group
from bmburst.errors import UserError
from tests.attention.test_burst_attention import zeros
from tests.distributed.threads import on_ranks
from tests.refusals import refused, says


class Standing(torch.Tensor):
    """As torch's DTensor, what other tensors are hidden in."""

    def __tensor_flatten__(self):
        return [], None


SHAPE = "[batch, local_tokens, heads, head_dim]"
DTYPE = "floating-point dtype | 16 bits | convert"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "casual"}, "mask | 'casual' | 'causal' | causal, full"),
        ({"mask": ["causal"]}, "mask | tuple | list of 1"),
        ({"layout": "stripe"}, "layout | 'stripe' | 'striped' | balanced, contiguous, striped, zigzag"),
        ({"layout": {"zigzag"}}, "layout | {'zigzag'} | balanced, contiguous, striped, zigzag"),
        ({"kernel": "cpuu"}, "kernel | 'cpuu' | 'cpu' | auto, cpu, cudnn, fa2, fa3, fa4, reference, torch"),
        ({"kernel": None}, "kernel | 'None' | auto, cpu, cudnn, fa2, fa3, fa4, reference, torch"),
        ({"kernel": "torch"}, "kernel | 'torch' | NVIDIA | on cpu | kernel='auto' | cpu, reference"),
        ({"strategy": "brust"}, "strategy | 'brust' | 'burst' | auto, burst, double-ring, gather, heads"),
        ({"transport": "gloom"}, "transport | 'gloom' | 'gloo' | auto, gloo, nccl, peer"),
        ({"transport": "nccl"}, "transport | 'nccl' | threads | transport='auto'"),
        ({"length": 9}, "length | 9 | 2 ranks | 4 local tokens | 1 to 8"),
        ({"length": 0}, "length | 0 | 2 ranks | 4 local tokens | 1 to 8"),
        ({"length": 8.0}, "length | whole number | 8.0"),
        ({"length": "8"}, "length | whole number | '8'"),
        ({"length": True}, "length | whole number | True"),
        ({"scale": True}, "scale | positive | True | None"),
        ({"deterministic": 1}, "deterministic | bool | 1 | True or False"),
        ({"return_lse": 1}, "return_lse | bool | 1 | True or False"),
        ({"scale": 0.0}, "scale | positive | 0.0 | None"),
        ({"scale": -0.5}, "scale | positive | -0.5 | None"),
        ({"scale": float("nan")}, "scale | positive | nan | None"),
        ({"scale": float("inf")}, "scale | positive | inf | None"),
        ({"scale": "0.5"}, "scale | positive | '0.5' | None"),
        ({"scale": 10**400}, "scale | positive | ... | None"),
        ({"scale": Fraction(1, 10**400)}, "scale | positive | Fraction(1, | ... | None"),
        ({"scale": 1e39}, "scale | positive | float32 | 1e+39 | None"),
        ({"softcap": 0}, "softcap | positive | 0 | None"),
        ({"softcap": -30.0}, "softcap | positive | -30.0 | None"),
        ({"softcap": float("inf")}, "softcap | positive | inf | None"),
        ({"softcap": 1e39}, "softcap | positive | float32 | 1e+39 | None"),
        ({"softcap": 1e-39}, "softcap | positive | float32 | 1e-39 | None"),
        ({"softcap": True}, "softcap | positive | True | None"),
        ({"softcap": torch.ones(1)}, "softcap | positive | tensor | None"),
        ({"softcap": 9.0, "kernel": "cpu"}, "kernel | 'cpu' | logit softcapping | kernel='auto' | reference"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_unknown_values_are_refused_on_every_rank(comm, options, words, wrong_ranks):
    with refused(words):
        bmburst.burst_attention(*zeros(comm), group=comm, **(options if comm.rank in wrong_ranks else {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), f"q | {SHAPE} | [4, 2, 8] | fix: "),
        (lambda q, k, v: (q.numpy(), k, v), "q | torch tensor | ndarray"),
        (lambda q, k, v: (q, k, v.tolist()), "v | torch tensor | list"),
        (lambda q, k, v: (q.long(), k, v), f"{DTYPE} | torch.int64"),
        (lambda q, k, v: [t.to(torch.float8_e4m3fn) for t in (q, k, v)], f"{DTYPE} | torch.float8_e4m3fn"),
        (lambda q, k, v: (q, k.to("meta"), v), "one device | cpu, meta and cpu | fix: "),
        (lambda q, k, v: [t.to("meta") for t in (q, k, v)], "q | meta tensor | fix: | device"),
        (lambda q, k, v: (q, k.double(), v), f"{DTYPE} | torch.float64"),
        (lambda q, k, v: (q, k, v[:, :, :1]), "k and v | shape | [1, 4, 2, 8] | [1, 4, 1, 8] | fix: "),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "k is [1, 2, 2, 8] | q is [1, 4, 2, 8] | equal | each rank"),
        (lambda q, k, v: (q[:, :, :1], k, v), "1 query heads | 2 key/value heads | multiple"),
        (lambda q, k, v: (q[:, :3], k[:, :3], v[:, :3]), "layout | 'zigzag' | multiple of 2 | got 3 | multiple of 4"),
        (lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), f"q | {SHAPE} | [1, 0, 2, 8] | fix: "),
        (lambda q, k, v: (q, k.as_subclass(Standing), v), "k | plain tensor | Standing | to_local()"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_bad_tensors_are_refused_on_every_rank(comm, change, words, wrong_ranks):
    tensors = zeros(comm)
    with refused(words):
        bmburst.burst_attention(*(change(*tensors) if comm.rank in wrong_ranks else tensors), group=comm)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, k, v: (None, k, v), "q | torch tensor | NoneType"),
        (lambda q, k, v: (q.sum(), k, v), f"q | {SHAPE} | [] | fix: "),
        (lambda q, _, v: (q, None, v), "k | torch tensor | NoneType"),
        (lambda q, k, v: (q, *(torch.cat((t, t)) for t in (k, v))), "k is [4, 4, 2, 8] | q is [2, 4, 2, 8]"),
        (lambda q, k, v: (q, k[:1], v[:1]), "k is [1, 4, 2, 8] | q is [2, 4, 2, 8]"),
    ],
)
@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_bad_tensors_are_refused_before_samples_are_parted(comm, change, words, wrong_ranks):
    """With a mask for each sample: the inputs as they were given, not what becomes of a sample's part."""
    tensors = [torch.cat((t, t)) for t in zeros(comm)]
    given = change(*tensors) if comm.rank in wrong_ranks else tensors
    with refused(words):
        bmburst.burst_attention(*given, mask=("causal", "full"), group=comm)


@pytest.mark.parametrize("group", [2, "world", SimpleNamespace(sequence=None)])
def test_what_is_no_group_is_refused(group):
    q = torch.zeros(1, 4, 2, 8)
    with refused("group", "process group", type(group).__name__, "mesh.sequence", "DeviceMesh", "mesh.get_group"):
        bmburst.burst_attention(q, q, q, group=group)


@pytest.mark.parametrize("function", [bmburst.shard, bmburst.unshard])
def test_what_only_stands_for_tensors_is_not_cut(function):
    with refused("plain tensor", "Standing", "to_local()"):
        function(torch.zeros(1, 8, 2).as_subclass(Standing))


OVER_RANKS = {
    "sink": lambda x, group: bmburst.burst_attention(*[torch.zeros(1, 4, 2, 8)] * 3, sink=x[0, 0, :, 0], group=group),
    "attention": lambda x, group: bmburst.burst_attention(x, x, x, group=group),
    "scan": lambda x, group: bmburst.burst_scan(x, x, group=group),
    "conv": lambda x, group: bmburst.burst_causal_conv(x.flatten(2), x.new_zeros(16, 2), group=group),
    "unshard": lambda x, group: bmburst.unshard(x, group=group),
}


@pytest.mark.parametrize("name", OVER_RANKS)
@on_ranks(2)
def test_transforms_of_torch_func_are_refused(comm, name):
    q, call = zeros(comm)[0].requires_grad_(), partial(OVER_RANKS[name], group=comm)
    words = "vmap | grad | torch.func | fix: | is_grads_batched"
    with refused(words):
        torch.vmap(call)(q[None])
    with refused(words):
        torch.func.grad(lambda q: call(q).sum())(q)
    with refused(words):
        torch.func.jvp(call, (q,), (q,))
    out = call(q)
    with refused(words):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("name", OVER_RANKS)
def test_tangents_are_refused(name):
    """On one rank: the threads of `on_ranks` would share torch's level of tangents."""
    q, call = torch.randn(1, 4, 2, 8).requires_grad_(), partial(OVER_RANKS[name], group=single_rank_group())
    out = call(q)
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(out.detach(), out.detach())
        with refused("tangent of forward-mode AD | make_dual | fix: torch.autograd.grad | unpack_dual"):
            call(forward_ad.make_dual(q, q))
        with refused("gradient has a tangent"):
            torch.autograd.grad(out, q, tangent, retain_graph=True)
        torch.autograd.grad(out, q, out.detach())


@pytest.mark.parametrize("name", OVER_RANKS)
@on_ranks(2)
def test_backwards_in_another_order_are_refused(comm, name):
    """Their tensors have the same shapes: each rank would get gradients of the other's call."""
    q = zeros(comm)[0].requires_grad_()
    outs = [OVER_RANKS[name](q, group=comm) for _ in range(2)]
    with refused("disagree | fix: | same order | backward of call 1 | backward of call 2"):
        outs[comm.rank].sum().backward()
    for out in outs:  # the same backward, twice
        for _ in range(2):
            out.sum().backward(retain_graph=True)


@on_ranks(2)
def test_ranks_that_disagree_are_not_shown_what_nobody_set(comm):
    q = torch.zeros(1, 64, 4, 32)
    with pytest.raises(UserError) as caught:  # an exchange of heads, whose pace hangs on the length
        bmburst.burst_attention(q, q, q, group=comm, strategy="heads", length=128 - comm.rank)
    told = [f"rank {rank}: burst_attention length {length}" for rank, length in enumerate((128, 127))]
    assert says(caught, "disagree", "fix: ", "same value").splitlines()[1:] == told


@on_ranks(2)
def test_ranks_that_disagree_are_refused_on_every_rank(comm):
    for name, values in (
        ("mask", ("causal", "full")),
        ("layout", ("zigzag", "striped")),
        ("length", (7, 8)),
        ("scale", (1.0, 2.0)),
        ("softcap", (1.0, 2.0)),
        ("kernel", ("cpu", "reference")),
        ("strategy", ("kv", "burst")),  # which are decided on by what travels
    ):
        with pytest.raises(UserError) as caught:
            bmburst.burst_attention(*zeros(comm), group=comm, **{"strategy": "kv", name: values[comm.rank]})
        shown = ("strategy.ring_tensors", ("kv", "q")) if name == "strategy" else (name, values)
        told = [f"rank {rank}: burst_attention {shown[0]} {value}" for rank, value in enumerate(shown[1])]
        assert says(caught, "disagree", "fix: ", "same value").splitlines()[1:] == told
    with refused("disagree", "fix: ", "rank 0: burst_attention", "q float32[1, 4, 2, 8]", "q float32[1, 6, 2, 8]"):
        bmburst.burst_attention(*zeros(comm, tokens=4 + 2 * comm.rank), group=comm)
    inputs = [t.requires_grad_(comm.rank == 1) for t in zeros(comm)]  # a backward that only one rank would run
    with refused("disagree", "fix: ", "grad mode", "without gradient", "with gradient"):
        bmburst.burst_attention(*inputs, group=comm)
    with torch.no_grad():
        bmburst.burst_attention(*inputs, group=comm)


def test_meta_tensors_are_refused():
    """They have shapes and no numbers."""
    q, ids = torch.zeros(1, 4, 2, 8, device="meta"), torch.zeros(1, 8, dtype=torch.int64, device="meta")
    cut = bmburst.SequenceShard.cut(8, layout="zigzag", size=2, rank=0)
    for call in (
        lambda: bmburst.burst_attention(q, q, q),
        lambda: bmburst.shard(ids),
        lambda: bmburst.unshard(ids),
        lambda: cut.take(ids),
        lambda: cut.batch(ids),
        lambda: bmburst.Documents.from_cu_seqlens(ids[0]),
    ):
        with refused("meta"):
            call()


@on_ranks(2)
def test_documents_of_one_ranks_tokens(comm):
    """Such as `cu_seqlens // ranks`, which ring-flash-attention takes: the second half would be padding."""
    q = torch.ones(1, 8, 2, 8)
    for layout in ("contiguous", "zigzag"):
        local = {"mask": bmburst.Documents.from_cu_seqlens([0, 3, 8]), "layout": layout, "group": comm}
        with refused("documents | 8 tokens | 2 ranks | whole sequence | fix: cu_seqlens | length=8"):
            bmburst.burst_attention(q, q, q, **local)
        assert bmburst.burst_attention(q, q, q, length=8, **local).shape == q.shape
