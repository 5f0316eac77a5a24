"""Other people's packages, where they are installed. Each gets the kernel under test where it lets us choose."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from bmburst.bench.cells import Cell
from bmburst.bench.methods.local import LocalKernel
from bmburst.bench.methods.method import Attend, Method, Setting
from bmburst.bench.work import Traffic, sizes
from bmburst_ops.flash import Gradients

_INTERFACE = "flash_attn.flash_attn_interface"


class _Package(Method):
    """A method whose code is a package's."""

    module = ""
    distribution = ""

    def refusal(self, cell: Cell) -> str | None:
        """See `Method.refusal`."""
        if self.module not in sys.modules and importlib.util.find_spec(self.module) is None:
            return f"the package {self.distribution} is not installed"
        return self.shape_refusal(cell)

    def shape_refusal(self, cell: Cell) -> str | None:
        """Return why the package cannot take this shape, or None."""
        del cell
        return None

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`."""
        return "zigzag" if cell.is_causal else "contiguous"


class RingFlashAttention(_Package):
    """ring-flash-attn: zigzag under a causal mask, its plain ring without."""

    name, about = "ring-flash-attn", "the package ring-flash-attn, zigzag, over the kernel under test"
    module, distribution = "ring_flash_attn", "ring-flash-attn"

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `_Package.shape_refusal`."""
        if cell.dtype in ("bfloat16", "float16"):
            return None
        return f"it is for 16 bits: in {cell.dtype} its sums are its buffers, which the next block overwrites"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: K and V go round in both directions, dK and dV in fp32 once more and home."""
        own = sizes(cell)
        once = 2.0 * own.k * (cell.ranks - 1)
        return Traffic(once, 2 * once + 2 * own.k * own.wide * cell.ranks)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel, f"{self.module}.adapters"):
            package = importlib.import_module(self.module)
        function: Callable[..., Tensor] = (
            package.zigzag_ring_flash_attn_func if cell.is_causal else package.ring_flash_attn_func
        )
        return lambda q, k, v: function(q, k, v, causal=cell.is_causal, group=setting.party.group)


class Yunchang(_Package):
    """yunchang (USP, arXiv:2405.07719): Ulysses inside as far as heads go, its ring outside."""

    name, about = "yunchang", "the package yunchang (USP): heads inside, ring outside"
    module, distribution = "yunchang", "yunchang"

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `_Package.shape_refusal`."""
        return None if cell.suite != "accuracy" else "its groups are those of the whole run"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        ranks = setting.party.size
        inside = max(n for n in range(1, ranks + 1) if ranks % n == 0 and cell.kv_heads % n == 0)
        package.set_seq_parallel_pg(inside, ranks // inside, setting.party.rank, ranks)
        attention = package.LongContextAttention(ring_impl_type="zigzag" if cell.is_causal else "basic")
        return lambda q, k, v: attention(q, k, v, causal=cell.is_causal)


class BurstAttentionPackage(_Package):
    """Burst-Attention's own package, with its backward that moves queries."""

    name, about = "burst-attention", "the package burst_attn, zigzag, queries travel in backward"
    module, distribution = "burst_attn", "Burst-Attention"

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        with flash_attention_2(setting.kernel):
            package = importlib.import_module(self.module)
        group = None if setting.party.is_world else setting.party.group
        levels = [None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = package.burst_attn_func(q, k, v, None, "cuda", cell.is_causal, True, False, group, levels)
            return out

        return attend


@contextmanager
def flash_attention_2(kernel: LocalKernel, *emptied: str) -> Iterator[None]:
    """While a package is imported, let flash-attn 2's private functions be the kernel under test.

    Args:
        kernel: What is called instead.
        emptied: Modules of the package that only bring in what the suite does not use, and much else.
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
    """A module with every name; what is imported from it is never called here."""

    __path__: list[str] = []  # noqa: RUF012  # lets it be a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused


def _unused(*_: object, **__: object) -> None:
    raise NotImplementedError("the benchmark has no such function of flash-attn")


def _interface(kernel: LocalKernel) -> ModuleType:
    """flash-attn 2.7's `_flash_attn_forward` and `_flash_attn_backward`, with its argument names and results."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor | None, ...]:
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax)
        out, lse = kernel.forward(q, k, v, causal, softmax_scale)
        return out, lse, None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        del deterministic, rng_state
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, False)
        given = None if dq is None or dk is None or dv is None else Gradients(dq, dk, dv)
        kernel.backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale, given)
        return softmax_lse

    module = _Anything(_INTERFACE)
    module.__dict__.update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    return module


def _require_plain(dropout: float, left: int, right: int, softcap: float, slopes: Tensor | None, softmax: bool) -> None:
    if dropout or left >= 0 or right >= 0 or softcap or slopes is not None or softmax:
        raise NotImplementedError("the benchmark's kernels have no dropout, window, softcap or alibi")
