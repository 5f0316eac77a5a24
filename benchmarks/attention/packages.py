"""Methods that run the packages of other projects, if they are installed, with the kernel under test.

The packages call private functions of flash-attn 2. Stand-ins replace these by the kernel under test.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import LLAMA3, PLAIN_MASKS, Cell, Traffic, sample_document_lengths, sizes
from benchmarks.attention.method import Attend, ForBackward, LocalKernel, Method, Setting
from bmburst_ops.flash import CAUSAL, FULL, Band, Gradients, Segments
from bmburst_ops.flash.fa4 import fa4_options
from bmburst_ops.flash.inputs import PackageArguments, aligned, gradient_memory
from bmburst_ops.flash.kernel import deliver_gradients

_STRIDE = 4  # KV heads that ring-flash-attn gathers at once, as in its own benchmark


class PackageMethod(Method):
    """A method that is implemented by a package."""

    module = ""
    distribution = ""

    def refusal(self, cell: Cell) -> str | None:
        """See `Method.refusal`."""
        if self.module not in sys.modules and importlib.util.find_spec(self.module) is None:
            return f"the package {self.distribution} is not installed"
        return super().refusal(cell)

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return "zigzag" if cell.is_causal else "contiguous"


class Yunchang(PackageMethod):
    """yunchang (USP, arXiv:2405.07719): the largest Ulysses degree that the heads allow, and a ring between groups."""

    name = "yunchang"
    module, distribution = "yunchang", "yunchang"

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return None if cell.suite != "accuracy" else "its process groups contain all ranks of the run"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        ranks = setting.group.size
        inside = max(n for n in range(1, ranks + 1) if ranks % n == 0 and cell.kv_heads % n == 0)
        package.set_seq_parallel_pg(inside, ranks // inside, setting.group.rank, ranks)
        attention = package.LongContextAttention(ring_impl_type="zigzag" if cell.is_causal else "basic")
        return lambda q, k, v: attention(q, k, v, causal=cell.is_causal)


class BurstAttentionPackage(PackageMethod):
    """The package of Burst-Attention, with its backward that moves queries."""

    name = "burst-attention"
    module, distribution = "burst_attn", "Burst-Attention"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        group = None if setting.group.is_world else setting.group.process_group
        levels = [None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = package.burst_attn_func(q, k, v, None, "cuda", cell.is_causal, True, False, group, levels)
            return out

        return attend


class RingFlashAttention(PackageMethod):
    """github.com/zhuzilin/ring-flash-attention: zigzag under a causal mask, otherwise its plain ring.

    For documents it uses zigzag in each document, padded to 2 P chunks. Padding is at the end of a document. No real
    token sees it, so results are exact, but it takes time.
    """

    name = "ring-flash-attn"
    module, distribution = "ring_flash_attn", "ring-flash-attn"
    masks: tuple[str, ...] = (*PLAIN_MASKS, "documents")

    def mask_refusal(self, cell: Cell) -> str | None:
        """See `Method.mask_refusal`. In version 0.1.8 `window_size` is saved for backward but not passed on."""
        if cell.mask == "window":
            return "its functions for packed sequences ignore the window in backward, and its rings have no window"
        return super().mask_refusal(cell)

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        if cell.dtype in ("bfloat16", "float16"):
            return None
        return f"it supports 16 bits only: in {cell.dtype}, the next block overwrites its accumulators"

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return "zigzag in each document" if cell.mask == "documents" else super().layout(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: K and V make a round in forward and in backward, and dK and dV in fp32 in backward."""
        own = sizes(cell)
        once = 2.0 * own.k * (cell.ranks - 1)
        padded = self._held(cell) / (cell.tokens // cell.ranks)
        return Traffic(once * padded, (2 * once + 2 * own.k * own.wide * cell.ranks) * padded)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        package, group = self.load(setting), setting.group.process_group
        if cell.mask != "documents":
            function: Callable[..., Tensor] = (
                package.zigzag_ring_flash_attn_func if cell.is_causal else package.ring_flash_attn_func
            )
            return lambda q, k, v: function(q, k, v, causal=cell.is_causal, group=group)
        chunks = [2 * n for n in _chunks(cell)]
        offsets = torch.tensor([0, *accumulate(chunks)], dtype=torch.int32, device=setting.group.device)
        call = {"cu_seqlens": offsets, "max_seqlen": max(chunks), "causal": True, "group": group}
        packed: Callable[..., Tensor] = package.zigzag_ring_flash_attn_varlen_func
        return lambda q, k, v: packed(q[0], k[0], v[0], **call)[None]

    def load(self, setting: Setting) -> Any:
        """Return the package, with the kernel under test."""
        with flash_attention_2(setting.kernel, f"{self.module}.adapters"):
            return importlib.import_module(self.module)

    def positions(self, cell: Cell, rank: int) -> Tensor:
        """See `Method.positions`; -1 for padding."""
        if cell.mask != "documents":
            return super().positions(cell, rank)
        return torch.tensor(zigzag_positions(sample_document_lengths(cell.tokens), cell.ranks, rank))

    def cut(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut`: padding holds zeros."""
        places = self.positions(cell, rank).to(whole.device)
        return whole[:, places].masked_fill_((places < 0)[:, None, None], 0.0)

    def real(self, held: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.real`."""
        return held[:, (self.positions(cell, rank) >= 0).to(held.device)]

    def shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.shape`."""
        return cell.batch, self._held(cell), heads, cell.head_dim

    def _held(self, cell: Cell) -> int:
        """Return the number of a rank's tokens, including padding."""
        return 2 * sum(_chunks(cell)) if cell.mask == "documents" else cell.tokens // cell.ranks


class RingFlashAttentionLlama3(RingFlashAttention):
    """ring-flash-attn's llama3 functions: each rank gathers K and V of a few heads at a time."""

    name = f"ring-flash-attn{LLAMA3}"
    masks = ("documents",)

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        del cell
        return "contiguous"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: K and V of all ranks, twice, and shares of dK and dV from all ranks."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 3 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: in addition K and V of some heads, those of the next heads, and gradients of both."""
        share = _stride(cell) / cell.kv_heads
        return super().memory(cell) + 6.0 * sizes(cell).k * cell.ranks * share

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        package, group = self.load(setting), setting.group
        edges = [0, *accumulate(sample_document_lengths(cell.tokens))]
        offsets = torch.tensor(edges, dtype=torch.int32, device=group.device)
        values = package.llama3_flash_attn_prepare_cu_seqlens(offsets, True, group.rank, group.size)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        call = dict(zip(names, values, strict=True)) | {"heads_k_stride": _stride(cell), "causal": True}
        function: Callable[..., Tensor] = package.llama3_flash_attn_varlen_func
        return lambda q, k, v: function(q[0], k[0], v[0], **call, group=group.process_group)[None]

    def positions(self, cell: Cell, rank: int) -> Tensor:
        """See `Method.positions`."""
        own = cell.tokens // cell.ranks
        return torch.arange(rank * own, (rank + 1) * own)

    def _held(self, cell: Cell) -> int:
        return cell.tokens // cell.ranks


def zigzag_positions(lengths: Sequence[int], size: int, rank: int) -> list[int]:
    """Return a rank's positions if each document is padded to 2 P equal chunks and the rank holds two of them.

    The rank holds chunks `rank` and `2 * size - 1 - rank` of every document. Positions are global, in local order; -1
    for padding.
    """
    held, start = [], 0
    for length in lengths:
        chunk = _chunk(length, size)
        for number in (rank, 2 * size - 1 - rank):
            places = range(number * chunk, (number + 1) * chunk)
            held += [start + place if place < length else -1 for place in places]
        start += length
    return held


def _chunk(length: int, size: int) -> int:
    return -(-length // (2 * size))


def _chunks(cell: Cell) -> list[int]:
    return [_chunk(n, cell.ranks) for n in sample_document_lengths(cell.tokens)]


def _stride(cell: Cell) -> int:
    return max(n for n in range(1, _STRIDE + 1) if cell.kv_heads % n == 0)


_INTERFACE = "flash_attn.flash_attn_interface"
_FA4 = "flash_attn.cute.interface"


@contextmanager
def flash_attention_2(kernel: LocalKernel, *emptied: str) -> Iterator[None]:
    """Return a context for importing a package, in which flash-attn 2's private functions run the kernel under test.

    Modules of the names `emptied` are replaced by empty ones, because the benchmark does not use them.
    """
    stand_ins = {_INTERFACE: _interface(kernel)}
    if "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        stand_ins["flash_attn"] = _Anything("flash_attn")
    stand_ins |= {name: _Anything(name) for name in emptied if name not in sys.modules}
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Anything(ModuleType):
    """A module in which every name exists. Importing from it succeeds, calling the imported functions does not."""

    __path__: list[str] = []  # noqa: RUF012  # makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused


def _unused(*_: object, **__: object) -> None:
    raise NotImplementedError("the benchmark does not implement this function of flash-attn")


_RESULTS = "out softmax_lse dq dk dv"
_OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_OPTIONS = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
_PLAIN = {"dropout_p": 0.0, **_OPTIONS, "return_softmax": False}  # the only values that the kernels under test support
_REQUIRED = dict.fromkeys(_OPTIONS, Parameter.empty)  # only the functions for packed sequences have defaults


def _interface(kernel: LocalKernel) -> ModuleType:
    """Return a replacement of flash-attn 2.7's module: dense and varlen, forward and backward, with its signatures."""

    def forward(given: dict[str, Any]) -> tuple[Tensor | None, ...]:
        tensors, scale = (given["q"], given["k"], given["v"]), given["softmax_scale"]
        if (call := _offsets(given)) is not None:
            return *packed_forward(kernel, *tensors, call, scale), None, None
        return *kernel.forward(*tensors, _band(given), scale), None, None

    def backward(given: dict[str, Any]) -> Tensor:
        tensors, scale = (given["q"], given["k"], given["v"]), given["softmax_scale"]
        targets = [given[name] for name in ("dq", "dk", "dv")]
        into = None if any(t is None for t in targets) else Gradients(*targets)
        results = ForBackward(given["dout"], given["out"], given["softmax_lse"], into)
        if (call := _offsets(given)) is not None:
            packed_backward(kernel, *tensors, results, call, scale)
        else:
            kernel.backward(*tensors, results, _band(given), scale)
        return results.lse

    module = _Anything(_INTERFACE)
    for kind, offsets, options in (("", "", _REQUIRED), ("varlen_", _OFFSETS, _OPTIONS)):
        shared = f"{offsets} dropout_p softmax_scale causal"
        flag = False if offsets else Parameter.empty
        for name, function, words, last in (
            ("forward", forward, f"q k v {shared}", {"return_softmax": flag}),
            ("backward", backward, f"dout q k v {_RESULTS} {shared}", {"deterministic": flag, "rng_state": None}),
        ):
            defaults = dict.fromkeys(words.split(), Parameter.empty) | options | last
            setattr(module, f"_flash_attn_{kind}{name}", _with_signature(function, defaults))
    return module


def _with_signature(function: Callable[[dict[str, Any]], Any], defaults: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a wrapper with these argument names and defaults as its signature, which packages read with `inspect`.

    It refuses options that the kernels under test do not support, and passes all arguments as a dict.
    """
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature([Parameter(name, kind, default=default) for name, default in defaults.items()])

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if any(given.get(name, plain) != plain for name, plain in _PLAIN.items()):
            raise NotImplementedError("the benchmark's kernels have no dropout, window, softcap or alibi")
        return function(given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _offsets(given: Mapping[str, Any]) -> PackageArguments | None:
    """Return the offsets of packed sequences; None for a dense call."""
    return (
        PackageArguments(_band(given), *(given[name] for name in _OFFSETS.split())) if "cu_seqlens_q" in given else None
    )


def packed_forward(
    kernel: LocalKernel, q: Tensor, k: Tensor, v: Tensor, call: PackageArguments, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output `[tokens, heads, head_dim]` and log-sum-exp `[heads, tokens]` of packed sequences.

    Offsets stay on the GPU if the kernel reads them there (FlashAttention-4), so peers do not wait for a copy to the
    host that only bmburst's interface needs.
    """
    if _takes_offsets(kernel, q, k, call):
        flat = (aligned(t) for t in (q, k, v))
        out, lse, *_ = importlib.import_module(_FA4)._flash_attn_fwd(
            *flat, softmax_scale=scale, return_lse=True, **fa4_options(call)
        )
        return out, lse
    out, lse = kernel.forward(q[None], k[None], v[None], _segments(call), scale)
    return out[0], lse[0]


def packed_backward(
    kernel: LocalKernel, q: Tensor, k: Tensor, v: Tensor, results: ForBackward, call: PackageArguments, scale: float
) -> None:
    """Write the gradients of packed sequences to `results.into`, which must not be None."""
    grad, out, lse, into = results
    assert into is not None  # the packages pass buffers for gradients
    if _takes_offsets(kernel, q, k, call):
        own_q, own_k, own_v, own_out, own_grad = (aligned(t) for t in (q, k, v, out, grad))
        memory = gradient_memory(own_q, own_k, own_v, into)
        importlib.import_module(_FA4)._flash_attn_bwd(
            *(own_q, own_k, own_v, own_out, own_grad, lse.float().contiguous()),
            softmax_scale=scale,
            **{"dq": memory.q, "dk": memory.k, "dv": memory.v},
            **fa4_options(call),
        )
        deliver_gradients(memory, into)
        return
    whole = ForBackward(grad[None], out[None], lse[None])
    gradients = kernel.backward(q[None], k[None], v[None], whole, _segments(call), scale)
    deliver_gradients(Gradients(*(t[0] for t in gradients)), into)


def _takes_offsets(kernel: LocalKernel, q: Tensor, k: Tensor, call: PackageArguments) -> bool:
    return kernel.name(q[None], k[None], Segments(call.band, (0,), (0,))) == "fa4"


def _segments(call: PackageArguments) -> Segments:
    assert call.queries is not None and call.keys is not None
    return Segments(call.band, tuple(call.queries.tolist()), tuple(call.keys.tolist()))


def _band(given: Mapping[str, Any]) -> Band:
    return CAUSAL if given["causal"] else FULL
