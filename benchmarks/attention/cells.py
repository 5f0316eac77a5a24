"""What can be measured, as plain data: a cell is one method on one shape, with a name that stays the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.engine.results import ONE_GPU, BaseCell, BaseSelection
from bmburst.errors import UserError

SUITES = ("sequence", "batch", "block", "documents", "window", "accuracy")
PLAIN_MASKS = ("causal", "full")
MASKS = (*PLAIN_MASKS, "documents", "window")  # the latter two have a suite each, of the same name
_KIB = 1024
SEQUENCE_TOKENS = tuple(_KIB * n for n in (32, 64, 128, 256, 512, 1024))
BATCH_TOKENS, BATCHES = 64 * _KIB, (1, 2, 4, 8)
BLOCK_TOKENS = tuple(_KIB * n for n in (32, 64, 128, 256))
MASK_TOKENS = {"documents": (128 * _KIB, 512 * _KIB), "window": (256 * _KIB,)}
ACCURACY_TOKENS = 4 * _KIB
MHA, GQA = (32, 32), (32, 8)
HEAD_DIM = 128
BALANCED, LLAMA3 = "-balanced", "-llama3"  # ends of names of methods that are for documents


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
    found = (cell for suite in SUITES for cell in _SUITE_CELLS[suite](selection) if _is_for(cell))
    return tuple(cell for cell in found if selection.fits(cell))


def accuracy_ranks(world: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the ranks there are, and those."""
    powers = (1 << n for n in range(world.bit_length()))
    return tuple(sorted({p for p in powers if p <= world} | {world}))


def _is_for(cell: Cell) -> bool:
    if cell.suite == "block" and cell.method.startswith("tensor-parallel"):
        return False
    return cell.mask == "documents" or not cell.method.endswith((BALANCED, LLAMA3))


def _cells(
    selection: Selection,
    suite: str,
    shapes: Iterable[tuple[int, int]],
    setups: Sequence[tuple[int, int]] = (MHA, GQA),
    masks: Sequence[str] = PLAIN_MASKS,
) -> Iterator[Cell]:
    shapes = tuple(shapes)
    for mask in (m for m in selection.masks if m in masks):
        for heads, kv_heads in selection.heads or setups:
            for batch, tokens in shapes:
                for method in selection.methods:
                    yield Cell(
                        suite=suite,
                        method=method,
                        ranks=selection.ranks[0],
                        device=selection.device,
                        tokens=tokens,
                        batch=batch,
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=selection.head_dim,
                        mask=mask,
                        dtype=selection.plain_dtype,
                    )


def _sequence(selection: Selection) -> Iterator[Cell]:
    yield from _cells(selection, "sequence", ((1, n) for n in selection.tokens or SEQUENCE_TOKENS))


def _batch(selection: Selection) -> Iterator[Cell]:
    lengths = selection.tokens or (BATCH_TOKENS,)
    yield from _cells(selection, "batch", ((b, n) for n in lengths for b in BATCHES))


def _block(selection: Selection) -> Iterator[Cell]:
    yield from _cells(selection, "block", ((1, n) for n in selection.tokens or BLOCK_TOKENS), (GQA,))


def _masked(mask: str) -> Callable[[Selection], Iterator[Cell]]:
    def listed(selection: Selection) -> Iterator[Cell]:
        yield from _cells(selection, mask, ((1, n) for n in selection.tokens or MASK_TOKENS[mask]), masks=(mask,))

    return listed


def _accuracy(selection: Selection) -> Iterator[Cell]:
    shapes = tuple((1, n) for n in selection.tokens or (ACCURACY_TOKENS,))
    for ranks in accuracy_ranks(selection.ranks[0]):
        names = selection.methods if ranks > 1 else (m for m in selection.methods if m in (ONE_GPU, "ours"))
        names = tuple(m for m in names if ranks == 1 or m != ONE_GPU)
        for cell in _cells(selection, "accuracy", shapes, masks=MASKS):
            if cell.method in names:
                yield replace(cell, ranks=ranks)


_SUITE_CELLS: Mapping[str, Callable[[Selection], Iterator[Cell]]] = {
    "sequence": _sequence,
    "batch": _batch,
    "block": _block,
    **{mask: _masked(mask) for mask in MASK_TOKENS},
    "accuracy": _accuracy,
}
