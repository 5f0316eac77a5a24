"""NaN kept in its document, after kernels whose tiles of packed documents reach into the next document.

Without Triton, which torch for NVIDIA GPUs brings along, results stay as they are. Callers leave out tensors on CPUs:
there the packages are stand-ins of tests.
"""

from functools import cache

from torch import Tensor

from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.limits import is_there
from bmburst_ops.flash.triton import cap_of, near_rows, strides_of
from bmburst_ops.flash.triton_launch import BlockSizes, Kernels, launch_grid
from bmburst_ops.flash.varlen import package_arguments
from bmburst_ops.pattern import Pattern, Segments

_SHARE = 4096  # tokens of a document that one program computes again
_WIDE_TILES = 96  # head dims up to this have tiles of more than 128 keys
_UNBOUNDED = 2**30


def isolate_forward(
    found: Partial, q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, scale: float, softcap: float | None = None
) -> Partial:
    """Return a kernel's result, with documents computed again where V of the next tokens is not finite.

    Args:
        found: The result; its output is written to. The log-sum-exp is right already.
        q: As given to `Kernel.forward`, as all that follows.
        k: Keys.
        v: Values.
        pattern: A band has one document, and is left as it is.
        scale: Factor on the scores, above 0.
        softcap: Of the scores, or None.
    """
    if isinstance(pattern, Segments) and is_there("triton"):
        tensors = [near_rows(t) for t in (q, k, v)]
        _run(_kernels().forward, [*tensors, found.out], q, k, pattern, scale, softcap, over_keys=True)
    return found


def isolate_backward(
    found: Gradients, given: BackwardInputs, *, pattern: Pattern, scale: float, softcap: float | None = None
) -> Gradients:
    """Return a kernel's gradients, with documents computed again where what follows them is not finite.

    Args:
        found: The gradients, which are written to.
        given: As given to `Kernel.backward`.
        pattern: See `isolate_forward`.
        scale: Factor on the scores, above 0.
        softcap: Of the scores, or None.
    """
    if isinstance(pattern, Segments) and is_there("triton"):
        tensors = [*map(near_rows, given[:4]), *(t.transpose(1, 2) for t in given[4:])]
        _run(_kernels().keys, [*tensors, *found[1:]], given.q, given.k, pattern, scale, softcap, over_keys=False)
        _run(_kernels().queries, [*tensors, found.q], given.q, given.k, pattern, scale, softcap, over_keys=True)
    return found


def _run(
    kernel: object,
    tensors: list[Tensor],
    q: Tensor,
    k: Tensor,
    pattern: Segments,
    scale: float,
    softcap: float | None,
    *,
    over_keys: bool,
) -> None:
    """Run a kernel whose programs hold queries and go over keys, or the other way round."""
    call, documents, head_dim = package_arguments(pattern, q, k), len(pattern.queries) - 1, q.shape[3]
    longest, tokens = (call.longest_queries, k.shape[1]) if over_keys else (call.longest_keys, q.shape[1])
    parts = -(-longest // _SHARE)
    left, right = (_UNBOUNDED if bound is None else bound for bound in pattern.band)
    numbers = (parts, tokens, q.shape[2] // k.shape[2], scale, cap_of(softcap, scale), left, right)
    size = 64 if head_dim <= 128 else 32
    behind = 256 if head_dim <= _WIDE_TILES else 128
    arguments = (*tensors, *map(strides_of, tensors), call.queries, call.keys, *numbers)
    launch_grid(kernel, k, documents * parts, arguments, BlockSizes(size, size, 4, 1), BEHIND=behind)


@cache
def _kernels() -> Kernels:
    from bmburst_ops.flash.triton_isolate import forward_kernel, keys_kernel, queries_kernel

    return Kernels(forward_kernel, keys_kernel, queries_kernel)
