"""The attention kernel that all methods run, and flash-attn 2's private functions on top of it for packages.

bmburst passes delta to backward. Peers keep the output, and the kernel computes delta. If a kernel supports this, peers
and the one-GPU comparison use it here, so bmburst's interface does not slow them down.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Band, Gradients, Segments, select_kernel
from bmburst_ops.flash.fa4 import fa4_options
from bmburst_ops.flash.inputs import PackageArguments, aligned, fa2_arguments, gradient_memory, package_arguments
from bmburst_ops.flash.kernel import deliver_gradients
from bmburst_ops.merge import row_dots

PackedPattern = Band | Segments
"""The mask of a call, aligned at the bottom right."""


class ForBackward(NamedTuple):
    """Arguments of backward besides the inputs: dO, output and log-sum-exp, and memory for the gradients."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    into: Gradients | None = None


class LocalKernel:
    """A kernel of `bmburst_ops.flash`, selected by name and by the tensors of each call.

    Args:
        name: A name of `bmburst_ops.flash.NAMES`; "auto" selects the first that supports the tensors.
    """

    def __init__(self, name: str = "auto") -> None:
        self.choice = name

    def name(self, q: Tensor, k: Tensor, pattern: PackedPattern) -> str:
        """Return the name of the kernel for these inputs."""
        return select_kernel(self.choice, q, k, needs=pattern.needs).name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: PackedPattern, scale: float) -> tuple[Tensor, Tensor]:
        """Return output, in q's dtype, and log-sum-exp `[batch, heads, queries]`."""
        part = select_kernel(self.choice, q, k, needs=pattern.needs).forward(q, k, v, pattern=pattern, scale=scale)
        return part.out.to(q.dtype), part.lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float
    ) -> Gradients:
        """Return the gradients, in q's dtype, from the global output and log-sum-exp."""
        kernel = select_kernel(self.choice, q, k, needs=pattern.needs)
        own = _OWN_BACKWARD.get(kernel.name)
        if own is not None:
            return own(q, k, v, results, pattern, scale)
        grad, out, lse, into = results
        given = BackwardInputs(grad, q, k, v, lse, row_dots(grad, out))
        grads = kernel.backward(given, pattern=pattern, scale=scale, deterministic=False, into=into)
        return Gradients(*(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)))


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float
) -> Gradients:
    interface, call = importlib.import_module("flash_attn.cute.interface"), package_arguments(pattern, q, k)
    flat_q, flat_k, flat_v, out, grad = (aligned(call.flat(t)) for t in (q, k, v, results.out, results.grad))
    memory = gradient_memory(flat_q, flat_k, flat_v, call.flat_targets(results.into))
    lse = call.flat_statistic(results.lse).float().contiguous()
    named = {"dq": memory.q, "dk": memory.k, "dv": memory.v}
    interface._flash_attn_bwd(flat_q, flat_k, flat_v, out, grad, lse, softmax_scale=scale, **named, **fa4_options(call))
    return call.gradients(memory, q.shape[0], results.into)


def _torch(q: Tensor, k: Tensor, v: Tensor, results: ForBackward, pattern: PackedPattern, scale: float) -> Gradients:
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state of a dropout that is zero
    call = fa2_arguments(pattern, q, k)
    grad, flat_q, flat_k, flat_v, out = (aligned(call.flat(t)) for t in (results.grad, q, k, v, results.out))
    lse = call.flat_statistic(results.lse).contiguous()
    lengths = call.queries, call.keys, call.longest_queries, call.longest_keys
    left, right = call.window
    window = {} if left == right == -1 else {"window_size_left": left, "window_size_right": right}
    found = torch.ops.aten._flash_attention_backward(
        *(grad, flat_q, flat_k, flat_v, out, lse, *lengths, 0.0, call.causal, unused, unused), scale=scale, **window
    )
    return call.gradients(Gradients(*found), q.shape[0], results.into)


Backward = Callable[[Tensor, Tensor, Tensor, ForBackward, PackedPattern, float], Gradients]
_OWN_BACKWARD: Mapping[str, Backward] = MappingProxyType({"fa4": _flash_attention_4, "torch": _torch})


_INTERFACE = "flash_attn.flash_attn_interface"
_FA4 = "flash_attn.cute.interface"


@contextmanager
def flash_attention_2(kernel: LocalKernel, *emptied: str) -> Iterator[None]:
    """Return a context for importing a package, in which flash-attn 2's private functions run the kernel under test.

    Args:
        kernel: The kernel to run instead.
        emptied: Modules of the package to replace by empty ones: the benchmark does not use them.
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
    """A module in which every name exists; the benchmark never calls what is imported from it."""

    __path__: list[str] = []  # noqa: RUF012  # lets it be a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused


def _unused(*_: object, **__: object) -> None:
    raise NotImplementedError("the benchmark has no such function of flash-attn")


_RESULTS = "out softmax_lse dq dk dv"
_OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_OPTIONS = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
_PLAIN = {"dropout_p": 0.0, **_OPTIONS, "return_softmax": False}  # all that the kernels under test can do
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
    """Return a function with these argument names and defaults in its signature, which packages read with `inspect`.

    It refuses options that the kernels under test do not support, and passes the others on by name.
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
    """Write the gradients to `results.into`, which must be given."""
    grad, out, lse, into = results
    assert into is not None  # the packages that are run give memory
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
