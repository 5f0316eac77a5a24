"""Weighted mixtures of data sources: reads the YAML file of a mixture, and interleaves the samples of its sources."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bmburst.config import read_config_file, read_layer
from bmburst.data.batches import Ids, Sequences
from bmburst.data.token_file import TokenFile
from bmburst.errors import UserError, with_fix
from bmburst.record_format import RecordFormat

SUFFIXES = (".yaml", ".yml")
_MOST_TURN = 1 << 16
_ALLOWED = "sources: [{path: chats.jsonl, weight: 3}, {path: books, weight: 1}]"
_FIX = "list the data under sources; settings of a run are for --config; to train on the text itself, name it .txt"
_BY_SIZE = "temperature: 2, sources: [{path: chats.jsonl}, {path: books}]"


_NAMES = frozenset(each.name for each in fields(RecordFormat))
"""Settings of a run that a source may have of its own."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a mixture.

    Attributes:
        path: A source in the form of `bmburst train --data`.
        weight: Its share of the sequences, relative to the weights of the other sources; None: by its size.
        temperature: With no weight, the share is `size ** (1 / temperature)`.
        names: Fields of `RecordFormat` that this source has in place of those of the run.
    """

    path: str
    weight: float | None
    temperature: float = 1.0
    names: Mapping[str, Any] = field(default_factory=dict)

    def form(self, of_run: RecordFormat) -> RecordFormat:
        """Return the names of fields, columns and roles."""
        return replace(of_run.record_format, **self.names)


def shares_of(sources: Sequence[Source], files: Sequence[TokenFile]) -> tuple[float, ...]:
    """Return the weights of sources: as given, or by their sizes in tokens and the temperature of the mixture."""
    total = sum(file.token_count for file in files)
    return tuple(
        float(f"{(file.token_count / total) ** (1 / source.temperature):.6g}")
        if source.weight is None
        else source.weight
        for source, file in zip(sources, files, strict=True)
    )


def read_mixture(source: str | Path) -> tuple[Source, ...] | None:
    """Return the sources of a mixture's YAML file; None if `source` is not a YAML file.

    Paths in it are relative to its folder.

    Raises:
        UserError: The file is malformed, or has no list of sources with positive weights, or a temperature and no
            weights. It may be that of another program, and its text is not meant to be trained on.
    """
    file = Path(source)
    if file.suffix.lower() not in SUFFIXES or not file.is_file():
        return None
    try:
        values = read_config_file(file)
    except UserError as error:
        raise with_fix(error, _FIX) from None
    if "sources" not in values:
        given = ", ".join(map(str, values)) or "none"
        raise UserError(f"{file} is no mixture of data: it has the keys {given:.60}\nallowed: {_ALLOWED}\nfix: {_FIX}")
    if rest := sorted(map(str, set(values) - {"sources", "temperature"})):
        raise UserError(f"{file}: unknown key {rest[0]}\nallowed: sources, temperature\nfix: remove it")
    found, temperature = [], _temperature(file, values.get("temperature"))
    keys = {"path"} if "temperature" in values else {"path", "weight"}
    for number, value in enumerate(values["sources"] if isinstance(values["sources"], list) else [None], 1):
        named = isinstance(value, dict) and keys <= set(value) <= keys | _NAMES and isinstance(value["path"], str)
        if not isinstance(value, dict) or not named:
            allowed, fix = _ALLOWED, "give path and weight"
            if "temperature" in values:
                allowed, fix = _BY_SIZE, "give the path alone: with a temperature, shares are by size"
            raise UserError(
                f"{file}: source {number} is {value!r:.60}\n"
                f"allowed: {allowed}; also {', '.join(sorted(_NAMES))}\nfix: {fix}"
            )
        path, names = str(file.parent / value["path"]), {key: value[key] for key in value if key in _NAMES}
        names = read_layer(RecordFormat, names, str(file))
        if "temperature" in values:
            found.append(Source(path, None, temperature, names))
            continue
        weight = value["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(
                f"{file}: source {number}, {value['path']}, has the weight {weight!r:.40}\nallowed: above 0\n"
                "fix: a positive weight, or remove the source"
            )
        found.append(Source(path, float(weight), names=names))
    if not found:
        raise UserError(f"{file}: there are no sources\nallowed: {_ALLOWED}\nfix: name at least one")
    return tuple(found)


def _temperature(file: Path, value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(
            f"{file}: the temperature is {value!r:.40}\nallowed: above 0; 1: shares by size, more: more equal shares\n"
            "fix: for example temperature: 2"
        )
    return float(value)


def sources_of(source: str) -> tuple[Source, ...]:
    """Return the sources of a mixture, or the single source; raises as `read_mixture`."""
    return read_mixture(source) or (Source(source, 1.0),)


@dataclass(frozen=True, slots=True)
class MixedFiles:
    """The token files of a mixture, and their weights.

    Raises:
        UserError: The files were made with different tokenizers.
    """

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        first = self.files[0]
        for file in self.files[1:]:
            if file.tokenizer_identity != first.tokenizer_identity:
                raise UserError(
                    f"'{file.path}' was made with tokenizer '{file.tokenizer_name}', and '{first.path}' with "
                    f"'{first.tokenizer_name}'\nallowed: one tokenizer in a mixture\nfix: make one of them again"
                )

    @property
    def eos_id(self) -> int:
        """The end-of-document id of all files."""
        return self.files[0].eos_id

    @property
    def tokenizer_identity(self) -> str:
        """The `identity` of the tokenizer of all files."""
        return self.files[0].tokenizer_identity

    @property
    def tokenizer_name(self) -> str:
        """Name of the common tokenizer, for `load_tokenizer`."""
        return self.files[0].tokenizer_name

    def require_vocab(self, vocab_size: int, name: str | Path | None = None) -> None:
        """Check that a model's vocabulary contains all ids; see `TokenFile.require_vocab`."""
        for file in self.files:
            file.require_vocab(vocab_size, name)


class Mixture:
    """Samples of several sources, drawn in proportion to the weights, independent of the sizes of the sources.

    The order of the sources is periodic. In one period, each source occurs in proportion to its weight, evenly spread.
    A source that is used up starts its next epoch, in another random order. A position in the data is one number, and
    the samples depend neither on the number of ranks nor on where a run was resumed.

    Args:
        parts: The sources, with the same sequence length and tokenizer.
        weights: Their weights, above 0; rounded to multiples of 1 / 65536 of the total if a period would be longer.
    """

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float]) -> None:
        self._parts, self._shares = tuple(parts), tuple(weights)
        self.sequence_length = parts[0].sequence_length
        self.held_out_fraction = parts[0].held_out_fraction
        self.pack = parts[0].pack
        # Sample indices: all samples of the first part, including its partial sample, then those of the second, ...
        self._ends = list(accumulate(len(part.evaluated()) for part in parts))
        self._turn = _turn(self._shares)
        counts = [0] * len(self._parts)
        places = []
        for part in self._turn:
            places.append(counts[part])
            counts[part] += 1
        self._places, self._counts = tuple(places), tuple(counts)

    @property
    def eos_id(self) -> int:
        """The end-of-document id, also used for padding."""
        return self._parts[0].eos_id

    @property
    def fingerprint(self) -> str:
        """Equal only for the same sources with the same weights."""
        text = repr([(part.fingerprint, weight) for part, weight in zip(self._parts, self._shares, strict=True)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Return the number of full samples of all sources."""
        return sum(map(len, self._parts))

    def labels_in(self, index: int) -> int:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.labels_in(own)

    def counted_in(self, index: int) -> int:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.counted_in(own)

    def text_bytes(self, index: int) -> int:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.text_bytes(own)

    def documents(self, index: int) -> tuple[int, ...] | None:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.documents(own)

    def parents(self, index: int) -> tuple[int, ...] | None:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.parents(own)

    def pairs(self, index: int, places: range) -> tuple[Ids, Ids]:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.pairs(own, places)

    @property
    def weighted(self) -> bool:
        """See `Sequences`."""
        return any(part.weighted for part in self._parts)

    def weights(self, index: int, places: range) -> npt.NDArray[np.float64]:
        """See `Sequences`."""
        part, own = self._find(index)
        return part.weights(own, places)

    def drawn(self, position: int, seed: int) -> int:
        """See `Sequences`."""
        turn, place = divmod(position, len(self._turn))
        number = self._turn[place]
        own = self._parts[number].drawn(turn * self._counts[number] + self._places[place], seed)
        return self._first(number) + own

    def evaluated(self, count: int | None = None) -> Sequence[int]:
        """Return every sample once, at most `count`: interleaved by weight until a source is used up."""
        sizes = [len(part.evaluated(count)) for part in self._parts]
        taken = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(self._turns(sizes), kind="stable")][:count]
        counts = np.bincount(taken, minlength=len(sizes)).tolist()
        owns = [part.evaluated(number) for part, number in zip(self._parts, counts, strict=True)]
        numbers = np.concatenate([np.array(own, np.int64) + self._first(i) for i, own in enumerate(owns)])
        found: list[int] = numbers[np.argsort(self._turns(counts), kind="stable")].tolist()
        return found

    def _turns(self, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return when each sample of each source is evaluated, if the sources have so many and their weights."""
        return np.concatenate([(np.arange(n) + 0.5) / weight for n, weight in zip(sizes, self._shares, strict=True)])

    def prompt(self, most: int) -> list[int]:
        """See `Sequences`."""
        return next((part for part in self._parts if len(part.evaluated())), self._parts[0]).prompt(most)

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _find(self, index: int) -> tuple[Sequences, int]:
        number = bisect_right(self._ends, index)
        if index < 0 or number == len(self._parts):
            raise IndexError(f"no sample {index} among {self._ends[-1]}")
        return self._parts[number], index - self._first(number)


@lru_cache(maxsize=16)
def _turn(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the sources of one period: n occurrences of a source are at the centers of n equal parts of the period."""
    counts = _counts(weights)
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    sources = np.repeat(np.arange(len(counts)), counts)
    return tuple(sources[np.argsort(times, kind="stable")].tolist())


def _counts(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the ratio of the weights; rounded if their sum exceeds `_MOST_TURN`."""
    # The decimal fraction of a float: 0.3 is 3 / 10, not its exact binary value.
    ratios = [Fraction(repr(float(weight))).as_integer_ratio() for weight in weights]
    scale = math.lcm(*(below for _, below in ratios))
    whole = [above * scale // below for above, below in ratios]
    shared = math.gcd(*whole)
    whole = [each // shared for each in whole]
    if sum(whole) > _MOST_TURN:
        whole = [max(1, round(_MOST_TURN * each / sum(whole))) for each in whole]
    return whole


def mixed(corpus: TokenFile | MixedFiles, make: Callable[[TokenFile], Sequences]) -> Sequences:
    """Return `make(corpus)` for a token file, or the `Mixture` of `make` of each file."""
    if isinstance(corpus, TokenFile):
        return make(corpus)
    return Mixture([make(file) for file in corpus.files], corpus.weights)
