"""Masks: which keys a query sees, in global positions. Imports no torch.

Under every mask except `BlockSparse` and `Tree` a query sees one interval of keys, and both ends of the interval do not
decrease from one query to the next. This also holds in the local order of each layout; tiles, communication and balance
rely on it (`bmburst.schedule.tiles`). A `Tree` is a disjoint union of such masks, its levels (`bmburst.schedule.tree`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmburst.amounts import array_of, digest, require_flag, short_text, whole_number
from bmburst.errors import UserError, require_known
from bmburst_ops.pattern import BLOCK, IntArray, Need, VisibleRanges

NAMES = ("causal", "full")
WIDEST = 1 << 62  # users may pass block sizes above 64 bits; no sequence is as long


class BlockMap(NamedTuple):
    """Blocks of `size` x `size` positions; a query sees the keys of those blocks of its row that are on."""

    size: int
    cells: NDArray[np.bool_]


class Mask(ABC):
    """Which keys a query may see. `&` joins masks: a key must be visible in all of them."""

    def rows(self, positions: IntArray, length: int) -> VisibleRanges:
        """Return the interval of keys that each of these queries sees, regardless of `blocks`.

        Args:
            positions: Global positions below `length`, ascending.
            length: Real tokens of the sequence, or of its beginning.

        Raises:
            UserError: The mask is made for fewer tokens, or a position is not in the sequence.
        """
        return self._rows(self._queries(positions, length), length)

    @abstractmethod
    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        """Return `rows` of positions and a length that were checked."""

    def _queries(self, positions: Any, length: int) -> IntArray:
        """Return positions as an array, after a check that they are in the first `length` tokens of the sequence."""
        whole_number("length", length, 0)
        if self.length is not None and length > self.length:
            self.require(length)
        queries = array_of("positions", positions)
        are_numbers = queries.ndim == 1 and (queries.dtype.kind in "iu" or not queries.size)
        if not are_numbers or (queries.size and not 0 <= queries.min() <= queries.max() < length <= WIDEST):
            raise UserError(
                f"positions are {short_text(positions)}, of {length} tokens\n"
                f"allowed: a list of whole numbers from 0 to length - 1; at most {WIDEST} tokens\n"
                "fix: positions of real tokens, or the length of their sequence"
            )
        return queries.astype(np.int64, copy=False)

    @property
    def length(self) -> int | None:
        """The number of tokens that the mask is made for; None: any number."""
        return None

    @property
    def blocks(self) -> BlockMap | None:
        """The map of blocks; None: all blocks are on."""
        return None

    @property
    def levels(self) -> "tuple[Mask, ...]":
        """Masks that share no visible pair, and together show what this mask shows; more than one in a tree only."""
        return (self,)

    @property
    def starts(self) -> tuple[int, ...]:
        """First positions of the documents, ascending; empty if the mask has none."""
        return ()

    @property
    def position_offsets(self) -> tuple[int, ...]:
        """For each start, what a token's position in the sequence exceeds its position in its document by."""
        return self.starts

    @property
    def key_starts(self) -> tuple[int, ...]:
        """First positions of the documents among the keys; they differ from `starts` in cross-attention."""
        return self.starts

    @property
    def needs(self) -> frozenset[Need]:
        """The features that a kernel must support for this mask."""
        return frozenset()

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return False

    def seen_intervals(self, first: int, last: int, length: int) -> list[tuple[int, int]]:
        """Return the intervals of keys that any of the consecutive queries `first` to `last` sees, without `blocks`.

        In self-attention the interval has no gaps, since each query sees itself; in cross-attention it may have keys
        that none of the queries sees.

        Raises:
            UserError: As `rows`, or the queries do not ascend.
        """
        self._queries([first, last], length)
        if first > last:
            raise UserError(f"queries {first} to {last} do not ascend\nfix: the first one first")
        return self._seen(first, last, length)

    def _seen(self, first: int, last: int, length: int) -> list[tuple[int, int]]:
        """Return `seen_intervals` of queries that were checked."""
        start, stop = self._rows(np.array([first, last]), length)
        return [(int(start[0]), int(stop[1]))]

    def key_length(self, length: int) -> int:
        """Return the number of real keys for `length` real queries; they differ in cross-attention.

        Raises:
            UserError: `length` is no number of tokens.
        """
        return whole_number("length", length, 0)

    def require(self, length: int) -> None:
        """Check that the mask fits a sequence.

        Raises:
            UserError: The mask is made for another number of tokens, or `length` is not one.
        """
        whole_number("length", length, 0)
        if self.length is not None and self.length != length:
            shorter = f", or pass length={self.length}: the tokens after it are padding" if self.length < length else ""
            raise UserError(
                f"the mask is made for {self.length} tokens, but the sequence has {length} real ones\n"
                f"fix: make it for {length} tokens{shorter}"
            )

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask of the keys that are visible in both.

        Raises:
            UserError: The masks are made for different numbers of tokens, have blocks of different sizes, or are a tree
                and a mask under which keys of a row would not be exact.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        parts = (mask.masks if isinstance(mask, Intersection) else (mask,) for mask in (self, other))
        return _joined(tuple(chain.from_iterable(parts)))


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    @property
    def sees_all(self) -> bool:
        """See `Mask.sees_all`."""
        return True

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        return VisibleRanges(np.zeros_like(positions), np.full_like(positions, length))

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees itself and the keys before it."""

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        del length
        return VisibleRanges(np.zeros_like(positions), positions + 1)

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query sees the last `tokens` keys up to itself; if not causal, also the first `tokens` keys from itself on.

    Raises:
        UserError: `tokens` is not an integer above 0, or `causal` is not a bool.
    """

    tokens: int
    causal: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole_number("tokens of a sliding window", self.tokens, 1))
        require_flag("causal", self.causal)

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset({"window"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        tokens = min(self.tokens, length)  # users may pass windows above 64 bits
        stop = positions + 1 if self.causal else np.minimum(positions + tokens, length)
        return VisibleRanges(np.maximum(positions - tokens + 1, 0), stop)

    def __str__(self) -> str:
        return f"window of {self.tokens}{', causal' if self.causal else ''}"


@dataclass(frozen=True, slots=True, init=False)
class BlockSparse(Mask):
    """Block-sparse attention: a query sees the keys of the blocks that are true in its block's row of the map.

    Args:
        block_map: `[blocks, blocks]`, true where the queries of the row's block see the keys of the column's block.
        block_size: Tokens of a block; the last block may be shorter.
        causal: Whether a query sees only itself and earlier tokens.

    Raises:
        UserError: The map is not a square matrix of bool, or of 0 and 1, the size is not an integer above 0, or
            `causal` is not a bool.
    """

    block_size: int
    causal: bool
    digest: str
    block_map: NDArray[np.bool_] = field(compare=False, repr=False)

    def __init__(self, block_map: Any, block_size: int, causal: bool = False) -> None:
        given = array_of("block_map", block_map)
        # An additive mask of 0 and -inf would mean the opposite.
        if given.dtype.kind not in "biuf" or not ((given >= 0) & (given < np.inf)).all():
            raise UserError(
                f"block_map has values that are neither true nor false, {given.dtype}\nallowed: bool, or 0 and 1\n"
                "fix: True where a block of queries sees a block of keys"
            )
        cells = np.array(given, dtype=bool)
        if cells.ndim != 2 or cells.shape[0] != cells.shape[1] or not cells.size:
            raise UserError(
                f"block_map has shape {list(cells.shape)}\nallowed: [blocks, blocks], at least 1 block\n"
                "fix: give one row for each block of queries and one column for each block of keys"
            )
        require_flag("causal", causal)
        cells.setflags(write=False)
        object.__setattr__(self, "block_size", whole_number("block_size", block_size, 1))
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "digest", digest(cells))
        object.__setattr__(self, "block_map", cells)

    @property
    def blocks(self) -> BlockMap:
        """See `Mask.blocks`."""
        return BlockMap(min(self.block_size, WIDEST), self.block_map)

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`."""
        return frozenset({"cells"} if self.block_size % BLOCK else {"blocks"})

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        return (Causal() if self.causal else Full())._rows(positions, length)

    def require(self, length: int) -> None:
        """See `Mask.require`."""
        whole_number("length", length, 0)
        blocks = -(-length // self.block_size)
        if blocks != len(self.block_map):
            raise UserError(
                f"{length} tokens are {blocks} blocks of {self.block_size}, but block_map has {len(self.block_map)}\n"
                f"fix: make it [{blocks}, {blocks}], or pass the length that it is for"
            )

    def __str__(self) -> str:
        return f"blocks of {self.block_size} ({self.digest}){', causal' if self.causal else ''}"


@dataclass(frozen=True, slots=True)
class Intersection(Mask):
    """A key is visible if it is visible in each of several masks; `&` makes it."""

    masks: tuple[Mask, ...]

    @property
    def length(self) -> int | None:
        """See `Mask.length`."""
        return next((mask.length for mask in self.masks if mask.length is not None), None)

    @property
    def blocks(self) -> BlockMap | None:
        """See `Mask.blocks`."""
        return next((mask.blocks for mask in self.masks if mask.blocks is not None), None)

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Mask.starts`."""
        return tuple(sorted({start for mask in self.masks for start in mask.starts}))

    @property
    def needs(self) -> frozenset[Need]:
        """See `Mask.needs`. Masks other than causal ones may cut blocks anywhere."""
        needs = frozenset[Need]().union(*(mask.needs for mask in self.masks))
        is_cut = "blocks" in needs and not all(isinstance(mask, BlockSparse | Causal) for mask in self.masks)
        return needs - {"blocks"} | {"cells"} if is_cut else needs

    def _rows(self, positions: IntArray, length: int) -> VisibleRanges:
        parts = [mask._rows(positions, length) for mask in self.masks]
        start = np.maximum.reduce([part.start for part in parts])
        return VisibleRanges(start, np.maximum(start, np.minimum.reduce([part.stop for part in parts])))

    def require(self, length: int) -> None:
        """See `Mask.require`."""
        for mask in self.masks:
            mask.require(length)

    def __str__(self) -> str:
        return " & ".join(map(str, self.masks))


def causal_mask(window: int | None) -> Mask:
    """Return the causal mask of a layer whose tokens see `window` tokens, their own included; None: all before."""
    return Causal() if window is None else SlidingWindow(window)


def make_mask(mask: "Mask | str") -> Mask:
    """Return the mask itself, or the mask of that name.

    Raises:
        UserError: The value is neither a mask nor "causal" nor "full".
    """
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, str):
        values = "causal, full, or a value such as bmburst.Documents(lengths); never a matrix"
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        raise UserError(
            f"mask must be a mask of bmburst or its name, got {got}\nallowed: {values}\nfix: pass one of these"
        )
    require_known("mask", mask, NAMES)
    return Full() if mask == "full" else Causal()


def sample_masks(masks: Sequence[Mask | str], batch: int, *, alike: bool) -> tuple[Mask, ...]:
    """Return the masks of the samples of a batch.

    Args:
        masks: A mask or its name for each sample.
        batch: Number of samples.
        alike: Whether all must be equal: ranks share layout "balanced", which is made for one mask.

    Raises:
        UserError: There are more or fewer masks, one is none, or they are not alike.
    """
    if not masks or len(masks) != batch:
        raise UserError(f"got {len(masks)} masks for a batch of {batch}\nfix: one mask, or one for each sample")
    made = tuple(map(make_mask, masks))
    if alike and len(set(made)) > 1:
        raise UserError("layout 'balanced' needs one mask, but each sample has its own\nfix: use layout 'zigzag'")
    return made


def _joined(masks: tuple[Mask, ...]) -> Mask:
    """Return the intersection. Duplicates and full masks are dropped, and block maps are combined into one."""
    lengths = {mask.length for mask in masks if mask.length is not None}
    if len(lengths) > 1:
        raise UserError(
            f"masks of different lengths cannot be combined: {' and '.join(map(str, sorted(lengths)))} tokens\n"
            "fix: make every mask for the same sequence length"
        )
    maps = [mask for mask in masks if isinstance(mask, BlockSparse)]
    if maps:
        if len({(mask.block_size, mask.block_map.shape) for mask in maps}) > 1:
            sizes = " and ".join(f"{list(mask.block_map.shape)} of {mask.block_size} tokens" for mask in maps)
            raise UserError(
                f"BlockSparse masks with different blocks cannot be combined: {sizes}\n"
                "fix: give all of them the same block_size and a block_map of the same shape"
            )
        cells = np.logical_and.reduce([mask.block_map for mask in maps])
        one = BlockSparse(cells, maps[0].block_size, any(mask.causal for mask in maps))
        masks = (*(mask for mask in masks if not isinstance(mask, BlockSparse)), one)
    kept = tuple(dict.fromkeys(mask for mask in masks if mask != Full())) or (Full(),)
    trees = [mask for mask in kept if len(mask.levels) > 1]
    if trees:  # a tree is causal
        kept = tuple(mask for mask in kept if mask != Causal())
    if trees and len(kept) > 1:
        raise UserError(
            f"a tree cannot be joined with another mask: {' & '.join(map(str, kept))}\n"
            "allowed: a Tree alone, or with causal or full\nfix: compute each row of the tree alone under that mask"
        )
    return kept[0] if len(kept) == 1 else Intersection(kept)
