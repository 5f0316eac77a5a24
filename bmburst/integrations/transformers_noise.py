"""NEFTune's noise (arXiv:2310.05914) for split sequences: that of the whole sequence, on each rank for its own tokens.

The hook of transformers scales noise by the length that it sees, which is a rank's, and ranks with one seed would draw
the same noise for different tokens. Here the ranks of a sequence draw with the random number state of the first one.
Their own may differ: transformers' Trainer, for example, restores that of each rank of a checkpoint that knows it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.neftune import neftune_post_forward_hook

from bmburst.attention.graphs import outside_of_graphs
from bmburst.comm.communicator import Communicator
from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import Modules
from bmburst.sequence import SequenceShard


@dataclass
class _Scope:
    """The part of the sequences that a model is called with, the ranks that share them, and whether noise was added."""

    cut: SequenceShard
    comm: Communicator
    was_added: bool = False


_SCOPE: ContextVar[_Scope] = ContextVar("noise")


@contextmanager
def noise_of_whole_sequences(
    modules: Modules, cut: SequenceShard, comm: Communicator, *, is_tree: bool
) -> Iterator[None]:
    """Replace NEFTune's hooks of a model inside this block, if it has any.

    Args:
        modules: Those of a model.
        cut: The part of the sequences that the model is called with.
        comm: The ranks that share the sequences.
        is_tree: Whether the sequence is a tree of rows, for which there is no noise of each row.

    Raises:
        UserError: A model in training adds noise to a tree, or a compiled graph of it adds none.
    """
    found = [
        (module._forward_hooks, key, module.training)
        for module in modules.having("neftune_noise_alpha")
        for key, hook in module._forward_hooks.items()
        if hook is neftune_post_forward_hook
    ]
    is_noisy = any(is_training for *_, is_training in found)
    if is_tree and is_noisy:
        raise UserError(
            "NEFTune's noise is drawn for each row, but rows of a tree share tokens\n"
            "fix: neftune_noise_alpha=None, or the rows one by one"
        )
    for hooks, key, _ in found:
        hooks[key] = _add_noise
    scope = _Scope(cut, comm)
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)
        for hooks, key, _ in found:
            hooks[key] = neftune_post_forward_hook
    if is_noisy and not scope.was_added:
        raise UserError(
            "NEFTune's noise was not added: torch.compile reuses a graph that it made without the noise\n"
            "fix: torch.compiler.reset() before the training, or torch_compile=False"
        )


@outside_of_graphs
def _add_noise(module: Any, _: Any, output: Tensor) -> Tensor:
    """Return this rank's embeddings `[batch, local_tokens, width]` with noise; a hook as transformers' own.

    It is the same function in each call of a model: torch.compile does not notice that a hook was replaced.
    """
    scope = _SCOPE.get()
    scope.was_added = True
    if not module.training:
        return output
    batch, _, width = output.shape
    _agree_on_random_numbers(output.device, scope.comm)
    # Drawn whole, before any layer has kept its input, so that the noise is that of one process.
    whole = output.new_zeros(batch, scope.cut.length, width)
    largest = float(module.neftune_noise_alpha / torch.sqrt(torch.tensor(scope.cut.length * width)))
    return output + scope.cut.take(whole.uniform_(-largest, largest))


def _agree_on_random_numbers(device: torch.device, comm: Communicator) -> None:
    """Let all ranks go on with the random number state of rank 0; on a GPU, the host waits for it."""
    if comm.size == 1:
        return
    if device.type == "cpu":
        (states,) = comm.all_gather(torch.get_rng_state()).wait()
        torch.set_rng_state(states[0])
        return
    of_kind = torch.get_device_module(device)
    (states,) = comm.all_gather(of_kind.get_rng_state(device).to(device)).wait()
    of_kind.set_rng_state(states[0].cpu(), device)
