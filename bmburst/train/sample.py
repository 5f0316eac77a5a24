"""A short text from the model as it is being trained: the whole prefix is computed again for every token."""

from typing import TYPE_CHECKING

import torch

from bmburst.mesh import Mesh
from bmburst.runtime.watchdog import beat
from bmburst.train.local_batch import causal_cut

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama

_TEMPERATURE = 0.7  # divides the logits


def generate(
    model: "Llama",
    mesh: Mesh,
    prompt: list[int],
    count: int,
    *,
    layout: str,
    device: torch.device,
    allowed: int,
    seed: int,
) -> list[int]:
    """Return `count` token ids that follow `prompt`; every rank calls it and gets the same ones.

    Args:
        model: On all ranks.
        mesh: The ranks; each sequence group computes the same text.
        prompt: At least one token.
        count: Tokens to generate.
        layout: The one the model attends in.
        device: Of the model.
        allowed: Only ids below this are drawn: a model may have more rows than its tokenizer has tokens.
        seed: Of the draw.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(count):
            # A sequence shorter than its group gives every rank a token of padding.
            length = max(len(ids), mesh.shape.sequence)
            cut = causal_cut(mesh, length, layout)
            whole = torch.tensor([ids + [0] * (length - len(ids))], dtype=torch.int64, device=device)
            part = cut.batch(whole)
            hidden = model(part.tokens, part.positions, length)
            last = torch.zeros_like(hidden[0, 0])
            mine = (part.positions[0] == len(ids) - 1).nonzero()
            if len(mine):
                last = hidden[0, mine.item()]
            (last,) = mesh.sequence.all_reduce(last).wait()  # one rank has it, the others add zeros
            # A model that has diverged gives NaN, which cannot be drawn from: it then draws at random.
            logits = model.project(last)[:allowed].float().cpu().nan_to_num()
            drawn = torch.multinomial(torch.softmax(logits / _TEMPERATURE, 0), 1, generator=generator)
            ids.append(int(drawn.item()))
            beat()
    return ids[len(prompt) :]
