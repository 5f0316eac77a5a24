"""Errors of single-device operations: a kernel that cannot run, and unsupported second derivatives."""

import difflib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


class KernelError(ValueError):
    """A kernel selected by name cannot run on these inputs or this machine; the message says why."""


def unknown_kernel(name: str, known: Sequence[str]) -> KernelError:
    """Return the error for an unknown kernel name, with the nearest known name."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return KernelError(f"unknown kernel '{name}'{hint}\nknown: {', '.join(known)}\nfix: give one of the known names")


def first_order(error: type[Exception]) -> Callable[[Backward], Backward]:
    """Return a decorator for the `backward` of a `torch.autograd.Function` that has no derivative of its own.

    Put it below `@staticmethod`. torch's `once_differentiable` raises only if the incoming gradient itself requires a
    gradient. For a loss that is linear in the output (a sum) it does not. `create_graph=True` then returns gradients
    without a graph, and a gradient penalty or a Hessian silently misses this part.

    Args:
        error: Raised if `create_graph=True`: only then does torch run backward with gradients enabled.
    """

    def decorate(backward: Backward) -> Backward:
        once = once_differentiable(backward)
        name = backward.__qualname__.partition(".")[0].lstrip("_")

        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():  # `once` would disable gradients again, which takes time of the host
                return backward(ctx, *grads)
            if not torch.compiler.is_compiling():
                raise error(
                    f"create_graph=True: the gradients of {name} cannot be differentiated again\n"
                    "allowed: create_graph=False\n"
                    "fix: for second derivatives compute this part in plain torch, on one rank"
                )
            return once(ctx, *grads)

        return checked

    return decorate
