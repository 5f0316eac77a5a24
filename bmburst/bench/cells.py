"""What can be measured, as plain data: a cell is one method on one shape, with a name that stays the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

from bmburst.bench.rows import place
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
ONE_GPU = "one-gpu"
BALANCED, LLAMA3 = "-balanced", "-llama3"  # ends of names of methods that are for documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        suite: One of `SUITES`.
        method: A name of `bmburst.bench.methods`.
        ranks: Ranks that share a sequence.
        device: "cuda" or "cpu".
        tokens: Tokens of the whole sequence.
        batch: Sequences at once.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Features of a head.
        mask: One of `MASKS`.
        dtype: Name of a torch dtype.
    """

    suite: str
    method: str
    ranks: int
    device: str
    tokens: int
    batch: int = 1
    heads: int
    kv_heads: int
    head_dim: int = HEAD_DIM
    mask: str = "causal"
    dtype: str = "bfloat16"

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
    def shape_name(self) -> str:
        """Everything but the method: what the rows of one comparison share."""
        tokens = f"{self.batch}x{self.tokens}" if self.suite == "batch" else f"{self.tokens}"
        mask = "" if self.suite == self.mask else f"/{self.mask}"
        return f"{self.suite}/{tokens}/{self.head_setup}{mask}"

    @property
    def name(self) -> str:
        """For example `sequence/65536/mha/causal/ours` or `window/262144/gqa/ours`; globs take it, or the key."""
        return f"{self.shape_name}/{self.method}"

    @property
    def key(self) -> str:
        """The name with where it ran: `...@8` on 8 GPUs, `...@2-cpu-float32` on 2 CPU ranks in another dtype."""
        return self.name + place(self.ranks, self.device, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which cells are listed; None takes what the suite has.

    Attributes:
        ranks: Ranks of the run.
        device: "cuda" or "cpu".
        dtype: Name of a torch dtype.
        tokens: Sequence lengths, in place of every suite's own.
        heads: `(heads, kv_heads)` setups, in place of MHA and GQA.
        head_dim: Features of a head.
        masks: Masks, in this order.
        methods: Names of methods, in the order in which they are measured.
        globs: Patterns for `Cell.name` or `Cell.key`; a cell is listed if one fits.
    """

    ranks: int
    device: str
    dtype: str = "bfloat16"
    tokens: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    head_dim: int = HEAD_DIM
    masks: tuple[str, ...] = MASKS
    methods: tuple[str, ...]
    globs: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        for heads, kv_heads in self.heads or ():
            if kv_heads < 1 or heads < 1 or heads % kv_heads:
                raise UserError(
                    f"--heads {heads} --kv-heads {kv_heads}\nallowed: heads that are a multiple of kv heads, 1 and more"
                )
        bad = [n for n in self.tokens or () if n < 1 or n % (2 * self.ranks)]
        if bad:
            raise UserError(
                f"--tokens {bad[0]} on {self.ranks} ranks\n"
                f"allowed: multiples of {2 * self.ranks}, so that every method cuts the sequence evenly"
            )


def list_cells(choice: Choice) -> tuple[Cell, ...]:
    """Return the chosen cells of every suite, in the order in which they run: causal first, short sequences first."""
    found = (cell for suite in SUITES for cell in _SUITE_CELLS[suite](choice) if _is_for(cell))
    return tuple(cell for cell in found if fits(cell, choice.globs))


class Named(Protocol):
    """What patterns are matched against."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def key(self) -> str:
        """What it is listed as."""
        ...


def fits(cell: Named, globs: Sequence[str]) -> bool:
    """Return whether a cell is one of those that patterns name, as they are called or as they are listed."""
    return any(fnmatchcase(name, glob) for name in (cell.name, cell.key) for glob in globs)


def accuracy_ranks(world: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the ranks there are, and those."""
    powers = (1 << n for n in range(world.bit_length()))
    return tuple(sorted({p for p in powers if p <= world} | {world}))


def _is_for(cell: Cell) -> bool:
    if cell.suite == "block" and cell.method.startswith("tensor-parallel"):
        return False
    return cell.mask == "documents" or not cell.method.endswith((BALANCED, LLAMA3))


def _cells(
    choice: Choice,
    suite: str,
    shapes: Iterable[tuple[int, int]],
    setups: Sequence[tuple[int, int]] = (MHA, GQA),
    masks: Sequence[str] = PLAIN_MASKS,
) -> Iterator[Cell]:
    shapes = tuple(shapes)
    for mask in (m for m in choice.masks if m in masks):
        for heads, kv_heads in choice.heads or setups:
            for batch, tokens in shapes:
                for method in choice.methods:
                    yield Cell(
                        suite=suite,
                        method=method,
                        ranks=choice.ranks,
                        device=choice.device,
                        tokens=tokens,
                        batch=batch,
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=choice.head_dim,
                        mask=mask,
                        dtype=choice.dtype,
                    )


def _sequence(choice: Choice) -> Iterator[Cell]:
    yield from _cells(choice, "sequence", ((1, n) for n in choice.tokens or SEQUENCE_TOKENS))


def _batch(choice: Choice) -> Iterator[Cell]:
    lengths = choice.tokens or (BATCH_TOKENS,)
    yield from _cells(choice, "batch", ((b, n) for n in lengths for b in BATCHES))


def _block(choice: Choice) -> Iterator[Cell]:
    yield from _cells(choice, "block", ((1, n) for n in choice.tokens or BLOCK_TOKENS), (GQA,))


def _masked(mask: str) -> Callable[[Choice], Iterator[Cell]]:
    def listed(choice: Choice) -> Iterator[Cell]:
        yield from _cells(choice, mask, ((1, n) for n in choice.tokens or MASK_TOKENS[mask]), masks=(mask,))

    return listed


def _accuracy(choice: Choice) -> Iterator[Cell]:
    shapes = tuple((1, n) for n in choice.tokens or (ACCURACY_TOKENS,))
    for ranks in accuracy_ranks(choice.ranks):
        names = choice.methods if ranks > 1 else (m for m in choice.methods if m in (ONE_GPU, "ours"))
        names = tuple(m for m in names if ranks == 1 or m != ONE_GPU)
        for cell in _cells(choice, "accuracy", shapes, masks=MASKS):
            if cell.method in names:
                yield replace(cell, ranks=ranks)


_SUITE_CELLS: Mapping[str, Callable[[Choice], Iterator[Cell]]] = {
    "sequence": _sequence,
    "batch": _batch,
    "block": _block,
    **{mask: _masked(mask) for mask in MASK_TOKENS},
    "accuracy": _accuracy,
}
