"""What can be measured, as plain data: a cell is one method on one shape, with a name that stays the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.engine.results import ONE_GPU, BaseCell, BaseSelection
from bmburst.errors import UserError

PLAIN_MASKS = ("causal", "full")
MASKS = (*PLAIN_MASKS, "documents", "window")  # the latter two have a suite each, of the same name
MHA, GQA = (32, 32), (32, 8)
HEAD_DIM = 128
BALANCED, LLAMA3 = "-balanced", "-llama3"  # ends of names of methods that are for documents
_KIB = 1024


class Suite(NamedTuple):
    """What a suite measures where the options do not say.

    Attributes:
        tokens: Sequence lengths.
        batches: Sequences at once.
        setups: `(heads, kv_heads)`.
        masks: The masks that it has, whatever the options say.
    """

    tokens: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    setups: tuple[tuple[int, int], ...] = (MHA, GQA)
    masks: tuple[str, ...] = PLAIN_MASKS


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "sequence": Suite(tuple(_KIB * n for n in (32, 64, 128, 256, 512, 1024))),
        "batch": Suite((64 * _KIB,), batches=(1, 2, 4, 8)),
        "block": Suite(tuple(_KIB * n for n in (32, 64, 128, 256)), setups=(GQA,)),
        "documents": Suite((128 * _KIB, 512 * _KIB), masks=("documents",)),
        "window": Suite((256 * _KIB,), masks=("window",)),
        "accuracy": Suite((4 * _KIB,), masks=MASKS),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cell(BaseCell):
    """One measurement.

    Attributes:
        suite: One of `SUITES`.
        method: A name of `benchmarks.attention.methods`.
        tokens: Tokens of the whole sequence.
        batch: Sequences at once.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Features of a head.
        mask: One of `MASKS`.
    """

    tokens: int
    batch: int = 1
    heads: int
    kv_heads: int
    head_dim: int = HEAD_DIM
    mask: str = "causal"

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def head_setup(self) -> str:
        """`mha` and `gqa` for the heads of the suites, else for example `4-2x64`."""
        known = {(*MHA, HEAD_DIM): "mha", (*GQA, HEAD_DIM): "gqa"}
        return known.get((self.heads, self.kv_heads, self.head_dim), f"{self.heads}-{self.kv_heads}x{self.head_dim}")

    @property
    def name(self) -> str:
        """For example `sequence/65536/mha/causal/ours` or `window/262144/gqa/ours`; globs take it, or the key."""
        tokens = f"{self.batch}x{self.tokens}" if self.suite == "batch" else f"{self.tokens}"
        mask = "" if self.suite == self.mask else f"/{self.mask}"
        return f"{self.suite}/{tokens}/{self.head_setup}{mask}/{self.method}"


@dataclass(frozen=True, kw_only=True)
class Selection(BaseSelection):
    """Which cells are listed; None takes what the suite has.

    Attributes:
        heads: `(heads, kv_heads)` setups, in place of MHA and GQA.
        head_dim: Features of a head.
        masks: Masks, in this order.

    Raises:
        UserError: Heads or a length do not divide.
    """

    heads: tuple[tuple[int, int], ...] | None = None
    head_dim: int = HEAD_DIM
    masks: tuple[str, ...] = MASKS

    def __post_init__(self) -> None:
        for heads, kv_heads in self.heads or ():
            if kv_heads < 1 or heads < 1 or heads % kv_heads:
                raise UserError(
                    f"--heads {heads} --kv-heads {kv_heads}\nallowed: heads that are a multiple of kv heads, 1 and more"
                )
        super().__post_init__()


def list_cells(selection: Selection) -> tuple[Cell, ...]:
    """Return the selected cells of every suite, in the order in which they run: causal first, short sequences first."""
    found = (cell for suite in SUITES for cell in _cells(selection, suite))
    return tuple(cell for cell in found if _is_for(cell) and selection.fits(cell))


def accuracy_ranks(world: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the ranks there are, and those."""
    powers = (1 << n for n in range(world.bit_length()))
    return tuple(sorted({p for p in powers if p <= world} | {world}))


def _is_for(cell: Cell) -> bool:
    """Return whether the method has a cell of its suite, mask and ranks at all."""
    if cell.suite == "accuracy" and (cell.ranks == 1) != (cell.method == ONE_GPU):
        return cell.ranks == 1 and cell.method == "ours"  # all others are measured on several ranks
    if cell.suite == "block" and cell.method.startswith("tensor-parallel"):
        return False
    return cell.mask == "documents" or not cell.method.endswith((BALANCED, LLAMA3))


def _cells(selection: Selection, name: str) -> Iterator[Cell]:
    suite = SUITES[name]
    everything = product(
        accuracy_ranks(selection.ranks[0]) if name == "accuracy" else selection.ranks,
        (mask for mask in selection.masks if mask in suite.masks),
        selection.heads or suite.setups,
        selection.tokens or suite.tokens,
        suite.batches,
        selection.methods,
    )
    for ranks, mask, (heads, kv_heads), tokens, batch, method in everything:
        yield Cell(
            suite=name,
            method=method,
            ranks=ranks,
            device=selection.device,
            dtype=selection.plain_dtype,
            tokens=tokens,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=selection.head_dim,
            mask=mask,
        )
