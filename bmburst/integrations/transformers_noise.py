"""NEFTune's noise (arXiv:2310.05914) for split sequences: that of the whole sequence, on each rank for its own tokens.

The hook of transformers scales noise by the length that it sees, which is a rank's, and ranks with one seed would draw
the same noise for different tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from bmburst.errors import UserError
from bmburst.sequence import SequenceShard


@contextmanager
def noise_of_whole_sequences(model: nn.Module, cut: SequenceShard, *, is_tree: bool = False) -> Iterator[None]:
    """Replace NEFTune's hooks of a model inside this block, if it has any.

    All ranks of a sequence must have the same random number state, as transformers' Trainer sets it.

    Args:
        model: A model, wrapped or not.
        cut: The part of the sequences that the model is called with.
        is_tree: Whether the sequence is a tree of rows, for which there is no noise of each row.

    Raises:
        UserError: A model in training adds noise to a tree.
    """
    found = [
        (module._forward_hooks, key, module.training)
        for module in model.modules()
        if hasattr(module, "neftune_noise_alpha")
        for key, hook in module._forward_hooks.items()
        if hook is neftune_post_forward_hook
    ]
    if is_tree and any(is_training for *_, is_training in found):
        raise UserError(
            "NEFTune's noise is drawn for each row, but rows of a tree share tokens\n"
            "fix: neftune_noise_alpha=None, or the rows one by one"
        )
    for hooks, key, _ in found:
        hooks[key] = partial(_add_noise, cut)
    try:
        yield
    finally:
        for hooks, key, _ in found:
            hooks[key] = neftune_post_forward_hook


def _add_noise(cut: SequenceShard, module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Return this rank's embeddings `[batch, local_tokens, width]` with noise; a hook as transformers' own."""
    del inputs
    if not module.training:
        return output
    batch, _, width = output.shape
    # Drawn whole, before any layer has kept its input, so that the noise is that of one process.
    whole = output.new_zeros(batch, cut.length, width)
    largest = float(module.neftune_noise_alpha / torch.sqrt(torch.tensor(cut.length * width)))
    return output + cut.take(whole.uniform_(-largest, largest))
