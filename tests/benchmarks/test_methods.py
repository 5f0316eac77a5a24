"""Every method that runs on a CPU computes attention, and receives as many bytes as it says."""

import importlib
import inspect
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.cells import Cell, mask_of, sizes
from benchmarks.attention.method import LocalKernel, Setting, both, forward_without_grad, prepare
from benchmarks.attention.methods import all_methods
from benchmarks.attention.packages import flash_attention_2
from benchmarks.engine.machine import RankGroup
from bmburst.errors import UserError
from tests.distributed.processes import on_processes
from tests.mask_oracle import visible

METHODS = all_methods("cpu")
PEERS = ("ulysses", "ring-li-2021")
OURS = tuple(name for name in METHODS if name.startswith("ours"))


def cell(method, ranks, **changes):
    values = {"tokens": 24 * ranks, "batch": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "dtype": "float64"}
    return Cell(suite="sequence", method=method, ranks=ranks, device="cpu", **{**values, **changes})


def definition(q, k, v, grad, seen):
    """O, dQ, dK, dV by torch's own attention, under a mask of the suite or `[queries, keys]`."""
    if isinstance(seen, str):
        seen = torch.from_numpy(visible(mask_of(seen, q.shape[1]), q.shape[1]))
    whole = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    out = scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=True)
    out.backward(grad.transpose(1, 2))
    return [t.transpose(1, 2) for t in (out.detach(), *(t.grad for t in whole))]


def random_whole(at):
    generator = torch.Generator().manual_seed(3)
    shapes = [(at.batch, at.tokens, h, at.head_dim) for h in (at.heads, at.kv_heads, at.kv_heads, at.heads)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


SHAPES = ({}, {"mask": "full"}, {"kv_heads": 8, "batch": 1})
MASKED = ({"mask": "documents", "tokens": 192, "batch": 1}, {"mask": "window", "tokens": 240, "batch": 1})


@pytest.mark.parametrize("size", [2, 4])
@on_processes()
def test_peers_compute_attention_and_receive_as_many_bytes_as_they_say(size):
    group = RankGroup(process_group=dist.group.WORLD, rank=dist.get_rank(), size=size, device=torch.device("cpu"))
    for method in PEERS:
        for changes in SHAPES:
            _compare(cell(method, size, **changes), group)
        _count(cell(method, size), group)


def test_peers_compute_attention_on_one_rank():
    for method in PEERS:
        _compare(cell(method, 1), RankGroup(process_group=None, rank=0, size=1, device=torch.device("cpu")))


@on_processes(2)
def test_ours_computes_attention_by_what_its_name_says():
    group = RankGroup(process_group=dist.group.WORLD, rank=dist.get_rank(), size=2, device=torch.device("cpu"))
    for method in OURS:
        for changes in SHAPES:
            # A strategy may refuse a number of ranks; then it does on all of them, and the row says why.
            with suppress(UserError) if method.startswith("ours-") else nullcontext():
                _compare(cell(method, 2, **changes), group)


@on_processes(3, fresh=True)
def test_documents_and_a_window_are_computed_on_three_ranks():
    group = RankGroup(process_group=dist.group.WORLD, rank=dist.get_rank(), size=3, device=torch.device("cpu"))
    names = ("heads-gloo", "gather-gloo", "ring-gloo", "gather-gloo-balanced", "ring-gloo-balanced")
    for method in ("ulysses", "ours", "ours-balanced", *(f"ours-{name}" for name in names)):
        for changes in MASKED:
            _compare(cell(method, 3, **changes, heads=6, kv_heads=3), group)
    sys.modules["ring_flash_attn"] = SimpleNamespace(zigzag_ring_flash_attn_varlen_func=_zigzag_in_documents)
    at = cell("ring-flash-attn", 3, **MASKED[0], heads=6, kv_heads=3)
    q, k, v, grad = random_whole(at)
    method = METHODS[at.method]
    mine = [method.cut(t, at, group.rank) for t in (q, k, v)]
    assert tuple(mine[0].shape) == method.shape(at, 6)
    found = method.bind(at, Setting(group=group, kernel=LocalKernel()))(*mine)
    right = method.cut(definition(q, k, v, grad, at.mask)[0], at, group.rank)
    torch.testing.assert_close(method.real(found, at, group.rank), method.real(right, at, group.rank))


def _zigzag_in_documents(q, k, v, *, cu_seqlens, max_seqlen, causal, group):
    """What the package's function computes, forward: of every document rank r has chunks r and 2 P - 1 - r."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    held = [torch.empty(2, *k.shape, dtype=k.dtype) for _ in range(size)]
    dist.all_gather(held, torch.stack((k, v)), group=group)
    assert causal and max_seqlen == cu_seqlens.diff().max() and cu_seqlens.dtype == torch.int32
    out = []
    for a, b in pairwise(cu_seqlens.tolist()):
        half = (b - a) // 2
        chunks = [kv[:, a : a + half] for kv in held] + [kv[:, a + half : b] for kv in reversed(held)]
        keys, values = torch.cat(chunks, 1)
        places = [p for n in (rank, 2 * size - 1 - rank) for p in range(n * half, (n + 1) * half)]
        seen = torch.arange(len(keys)) <= torch.tensor(places)[:, None]
        rows = (t.transpose(0, 1)[None] for t in (q[a:b], keys, values))
        out.append(scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


def _compare(at, group):
    method = METHODS[at.method]
    assert method.refusal(at) is None
    q, k, v, grad = random_whole(at)
    exact = definition(q, k, v, grad, at.mask)
    mine = [method.cut(t, at, group.rank).contiguous().requires_grad_() for t in (q, k, v)]
    out_grad = method.cut(grad, at, group.rank).contiguous()
    heads = at.heads, at.kv_heads, at.kv_heads, at.heads
    assert [tuple(t.shape) for t in (*mine, out_grad)] == [method.shape(at, h) for h in heads]
    attend = method.bind(at, Setting(group=group, kernel=LocalKernel()))
    found = forward_without_grad(attend, *mine), *both(attend, *mine, out_grad)
    expected = (method.cut(t, at, group.rank) for t in exact)
    for name, ours, right in zip(("O", "dQ", "dK", "dV"), found, expected, strict=True):
        error = ((ours - right).norm() / right.norm()).item()
        assert error < 1e-10, f"{at.key} {name}: relative error {error:.1e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CountingParty(RankGroup):
    """Counts what a rank receives, by the least that each collective needs."""

    bytes: list[float] = field(default_factory=lambda: [0.0])

    def all_to_all(self, parts):
        self.bytes[0] += parts.nbytes * (self.size - 1) / self.size
        return super(CountingParty, self).all_to_all(parts)

    def reduce_scatter(self, parts):
        self.bytes[0] += parts[0].nbytes * (self.size - 1)
        return super(CountingParty, self).reduce_scatter(parts)

    def rotate(self, tensor):
        self.bytes[0] += tensor.nbytes
        return super(CountingParty, self).rotate(tensor)


def _count(at, plain):
    group = CountingParty(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    calls = prepare(METHODS[at.method], at, Setting(group=group, kernel=LocalKernel()))
    said, own, kept = METHODS[at.method].traffic(at), sizes(at), {}
    for call, expected in ((calls.forward, said.forward), (calls.both, said.forward_backward)):
        group.bytes[0] = 0
        with saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
            call()
        assert group.bytes[0] == expected, at.key
    rows = at.tokens * own.q / at.head_dim if at.method == "ring-li-2021" else own.q + own.statistics
    assert sum(t.nbytes for t in kept.values()) == own.q + 2 * own.k + rows, at.key


def test_what_cannot_be_dealt_out_is_refused():
    refusal = METHODS["ulysses"].refusal
    assert "4 key/value heads do not divide by 8 ranks" in refusal(cell("ulysses", 8))
    assert "6 query heads" in refusal(cell("ulysses", 4, heads=6, kv_heads=6))
    assert refusal(cell("ulysses", 4)) is None


def test_quadratic_memory_is_estimated():
    at = cell("ring-li-2021", 8, tokens=1 << 20, heads=32, kv_heads=32, head_dim=128, batch=1, dtype="bfloat16")
    assert METHODS["ring-li-2021"].memory(at) > 2**40
    for name in ("ulysses", "ours"):
        assert 2**33 < METHODS[name].memory(at) < 2**37, name


PEER = """
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, a_function_that_nobody_calls
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from .adapters import substitute_hf_flash_attn
"""


def test_packages_written_for_flash_attention_2_get_the_kernel_under_test(tmp_path, monkeypatch):
    package = tmp_path / "peer_of_fa2"
    package.mkdir()
    (package / "__init__.py").write_text(PEER)
    (package / "adapters.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    before = {name for name in sys.modules if name.startswith("flash_attn")}
    with flash_attention_2(LocalKernel(), "peer_of_fa2.adapters"):
        peer = importlib.import_module("peer_of_fa2")
    assert {name for name in sys.modules if name.startswith("flash_attn")} == before
    q, grad = torch.randn(2, 2, 13, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 13, 2, 8, dtype=torch.float64)
    plain = {"dropout_p": 0.0, "causal": True, "alibi_slopes": None, "softcap": 0.0, "softmax_scale": 8**-0.5}
    plain |= {"window_size_left": -1, "window_size_right": -1}
    out, lse, *_ = peer._flash_attn_forward(q=q, k=k, v=v, return_softmax=False, **plain)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    targets = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    tensors = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    peer._flash_attn_backward(**tensors, **targets, deterministic=False, **plain)
    torch.testing.assert_close((out, *grads), definition(q, k, v, grad, "causal"), rtol=1e-10, atol=1e-10)
    offsets = {"cu_seqlens_q": torch.tensor([0, 4, 13]), "cu_seqlens_k": torch.tensor([0, 4, 17])}
    offsets |= {"max_seqlen_q": 9, "max_seqlen_k": 13}
    q, grad = torch.randn(2, 13, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 17, 2, 8, dtype=torch.float64)
    out, lse, *_ = peer._flash_attn_varlen_forward(q=q, k=k, v=v, return_softmax=False, **offsets, **plain)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    targets = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    tensors = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    peer._flash_attn_varlen_backward(**tensors, **targets, deterministic=False, **offsets, **plain)
    seen = torch.zeros(13, 17, dtype=torch.bool)
    seen[:4, :4], seen[4:, 4:] = torch.ones(4, 4).tril(), torch.ones(9, 13).tril(4)  # at the bottom right
    whole = [t[None] for t in (q, k, v, grad)]
    for found, exact in zip((out, *grads), definition(*whole, seen), strict=True):
        torch.testing.assert_close(found, exact[0], rtol=1e-10, atol=1e-10)
    assert lse.shape == (4, 13)
    with pytest.raises(NotImplementedError, match="window"):
        peer._flash_attn_forward(q=q, k=k, v=v, return_softmax=False, **{**plain, "window_size_left": 4})


def test_stand_ins_for_flash_attention_2_have_its_arguments_and_defaults():
    """ring-flash-attn reads names and defaults with `inspect.getfullargspec`, of functions only."""
    with flash_attention_2(LocalKernel()):
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    options = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
    offsets = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    results = "dout q k v out softmax_lse dq dk dv"
    for name, arguments, defaults in (
        ("forward", f"q k v {options} return_softmax", None),
        ("backward", f"{results} {options} deterministic rng_state", (None,)),
        ("varlen_forward", f"q k v {offsets} {options} return_softmax", (-1, -1, 0.0, None, False)),
        ("varlen_backward", f"{results} {offsets} {options} deterministic rng_state", (-1, -1, 0.0, None, False, None)),
    ):
        function = getattr(interface, f"_flash_attn_{name}")
        found = inspect.getfullargspec(function)
        assert inspect.isfunction(function)
        assert (found.args, found.defaults, found.varargs, found.varkw) == (arguments.split(), defaults, None, None)
