"""Rows of GRPO that all ranks of a sequence group hold: exchanged, packed one after another or as prefix trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError
from bmburst.integrations.transformers import Part, SplitSequences
from bmburst.integrations.transformers_modules import Modules, outermost
from bmburst.integrations.transformers_rotary import by_length
from bmburst.mesh import Mesh
from bmburst.schedule.documents import Documents
from bmburst.sequence.packed_tree import pack_tree
from bmburst_ops import IGNORE_INDEX

_KEYS = frozenset(
    {
        "advantages",
        "completion_ids",
        "completion_mask",
        "importance_sampling_ratio",
        "num_items_in_batch",
        "old_logps",
        "old_per_token_logps",
        "prompt_ids",
        "prompt_mask",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
    }
)
"""What the rows of a micro-batch may hold."""
Values = tuple[Tensor, Tensor | None]
"""Log-probabilities and entropies of the completions of some rows, each `[rows, completion tokens]`."""


class Rows(NamedTuple):
    """Rows that all ranks of a group hold: ids and attention mask `[rows, tokens]`, and the tokens of completions."""

    ids: Tensor
    mask: Tensor
    keep: int

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> "Rows":
        """Return the rows of a micro-batch."""
        ids, mask = (torch.cat((rows[f"prompt_{name}"], rows[f"completion_{name}"]), 1) for name in ("ids", "mask"))
        return cls(ids, mask, rows["completion_ids"].shape[1])

    def split(self, size: int) -> list["Rows"]:
        """Return at most `size` rows at a time."""
        pairs = zip(self.ids.split(size), self.mask.split(size), strict=True)
        return [Rows(ids, mask, self.keep) for ids, mask in pairs]

    @property
    def labels(self) -> Tensor:
        """The ids of completions, elsewhere `IGNORE_INDEX`; not shifted."""
        found = self.ids.masked_fill(~self.mask.bool(), IGNORE_INDEX)
        found[:, : -self.keep] = IGNORE_INDEX
        return found

    def placed(self, values: Tensor) -> Tensor:
        """Return the values of the rows' tokens, one row after another, at the places of completions; 0 at padding."""
        return values.new_zeros(self.ids.shape).masked_scatter(self.mask.bool(), values)[:, -self.keep :]


def rows_of_ranks(mesh: Mesh, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the rows of every rank of this rank's sequence group. Collective over all ranks; the host waits.

    Args:
        mesh: The ranks.
        mine: This rank's rows: tensors with at most two dimensions, with equal names and dtypes on all ranks.

    Raises:
        UserError: A name is not known, a prompt has no token, or no completion of a rank has one.
        Mismatch: The ranks hold different kinds of rows.
    """
    names = sorted(mine)

    def decide() -> tuple[None, str]:
        if unknown := sorted({*names} - _KEYS):
            raise UserError(
                f"rows have {unknown[0]}, which is not known on split sequences\nallowed: {', '.join(sorted(_KEYS))}\n"
                "fix: text, without images; of a trainer of your own, leave the key out of the rows"
            )
        if "completion_ids" in mine and not mine["completion_ids"].shape[1]:
            raise UserError(
                "no completion of a rank has a token\nallowed: one or more in some row of each rank\n"
                "fix: a rollout_func whose completions end with the end-of-sequence token"
            )
        if not bool(mine["prompt_mask"].any(1).all()):
            raise UserError("a prompt has no token\nallowed: one or more\nfix: prompts that begin with a token")
        kinds = [f"{name} {mine[name].dtype} of {mine[name].dim()}" for name in names]
        return None, "\n".join(["rows of a micro-batch", *kinds])

    with mesh.world.checking():
        mesh.world.decided(decide)
    comm: CheckedCommunicator = mesh.sequence
    shapes = torch.tensor([[*mine[name].shape, 1, 1][:2] for name in names], device=comm.device)
    (every,) = comm.all_gather(shapes).wait()
    sizes = [mine[name].element_size() for name in names]
    nbytes = [
        [rows * columns * size for (rows, columns), size in zip(rank, sizes, strict=True)] for rank in every.tolist()
    ]
    data = torch.cat([mine[name].contiguous().reshape(-1).view(torch.uint8) for name in names]).to(comm.device)
    padded = nn.functional.pad(data, (0, max(map(sum, nbytes)) - len(data)))
    (gathered,) = comm.all_gather(padded).wait()
    found = []
    for row, shape, counts in zip(gathered, every.tolist(), nbytes, strict=True):
        pieces = row[: sum(counts)].split(counts)
        found.append(
            {
                name: piece.clone().view(mine[name].dtype).reshape(size[: mine[name].dim()])
                for name, piece, size in zip(names, pieces, shape, strict=True)
            }
        )
    return found


Placed = Callable[[Tensor], list[Tensor]]
"""From values of a rank's tokens of a part to those of the completions of some rows, `[rows, completion tokens]`."""


def as_documents(split: SplitSequences, rows: Sequence[Rows]) -> tuple[Part, Placed]:
    """Return rows packed one after another."""
    real = [each.mask.bool() for each in rows]
    ids, labels = (
        torch.cat([tensor[own] for tensor, own in zip(tensors, real, strict=True)])[None]
        for tensors in ([each.ids for each in rows], [each.labels for each in rows])
    )
    lengths = tuple(length for own in real for length in own.sum(1).tolist() if length)
    part = split.part(ids, labels=labels, documents=Documents(lengths))

    def placed(local: Tensor) -> list[Tensor]:
        whole = part.gathered(local)[0].roll(1)  # a label is the token behind
        pieces = whole.split([int(own.sum()) for own in real])
        return [each.placed(piece) for each, piece in zip(rows, pieces, strict=True)]

    return part, placed


def as_trees(split: SplitSequences, rows: Sequence[Rows]) -> tuple[Part, Placed]:
    """Return rows packed as prefix trees."""
    real = [own for each in rows for own in each.mask.bool().cpu()]
    texts, labels = (
        [row[own] for row, own in zip(chain.from_iterable(found), real, strict=True)]
        for found in ([each.ids.cpu() for each in rows], [each.labels.cpu() for each in rows])
    )
    # A row of one token has no label. It is doubled, because a tree's rows have two tokens or more.
    packed = pack_tree(
        [text if len(text) > 1 else text.repeat(2) for text in texts],
        [own if len(own) > 1 else own.new_full((2,), IGNORE_INDEX) for own in labels],
    )
    part = split.part(tree=packed)

    def placed(local: Tensor) -> list[Tensor]:
        values = packed.counted_rows(part.gathered(local)[0])
        # The first token of a row has no value.
        of_texts = iter(nn.functional.pad(own, (1, 0))[: len(text)] for own, text in zip(values, texts, strict=True))
        return [each.placed(torch.cat([next(of_texts) for _ in each.ids])) for each in rows]

    return part, placed


def with_lengths_of_trl(part: Part, rows: Sequence[Rows], model: nn.Module) -> Part:
    """Return a part that is refused by a model whose rotary tables would not be those of TRL's calls of the same rows.

    Such tables depend on the largest position of a call, and TRL's positions go on in the padding. With other tables
    the old log-probabilities of a row would not be those of its loss. A "dynamic" module also depends on the rows that
    it has seen, which are those of one rank in TRL, so beyond the original length its tables are not known.
    """
    padded = {each.ids.shape[1] for each in rows}

    def ends() -> tuple[int, ...]:
        other = (1,) if any(rotary.is_dynamic for rotary in by_length(Modules(model))) else ()
        return (*part.ends(), *padded, *other)

    return replace(part, ends=ends)


def _windows(model: nn.Module) -> list[int]:
    """Return the windows of a model's layers, by transformers' own reading of the configuration."""
    found = outermost(model)
    layers = [] if found is None else DynamicCache(config=found.config).layers
    return [window for layer in layers if (window := getattr(layer, "sliding_window", None)) is not None]


def require_wide(model: nn.Module, longest: int | None) -> None:
    """Check that no completion can be longer than a window of a model's layers, of a row that shares its prompt.

    Otherwise it would be refused in the first step that has such a row. The length of prompts is not known yet.

    Args:
        model: The model.
        longest: Most tokens of a completion; None: any number.

    Raises:
        UserError: One can be.
    """
    windows = _windows(model)
    if windows and (longest is None or min(windows) < longest):
        raise UserError(
            f"share_prompts=True with a layer with a window of {min(windows)} tokens, and max_completion_length "
            f"{longest}\nallowed: rows that no window cuts\nfix: share_prompts=False, or max_completion_length "
            f"{min(windows)} less the tokens of the prompts"
        )


def require_wide_rows(mesh: Mesh, model: nn.Module, rows: Sequence[Rows]) -> None:
    """Check that no window of a model's layers cuts a row, on all ranks: other groups have other rows. Collective.

    Raises:
        UserError: A window cuts a row of some rank.
    """
    if not (windows := _windows(model)):
        return

    def decide() -> tuple[None, str]:
        longest = max(int(each.mask.sum(1).max()) for each in rows)
        if min(windows) < longest - 1:  # the last token is a label only
            raise UserError(
                f"share_prompts=True with a layer with a window of {min(windows)} tokens, and a row of {longest}\n"
                "allowed: rows that no window cuts\nfix: share_prompts=False"
            )
        return None, "rows with shared prompts"

    with mesh.world.checking():
        mesh.world.decided(decide)
