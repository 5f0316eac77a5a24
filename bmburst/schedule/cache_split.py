"""How a KV cache is split over ranks: which heads and tokens each rank keeps, and how many bytes. Imports no torch.

The ranks form a grid of head groups x token groups. Rank `t * head_groups + h` keeps the KV heads of head group h for
the tokens of token group t. No head of a token is stored twice. Tensor-parallel decoding needs a split by heads only
(one token group). With more ranks than KV heads, the cache is split by both (Helix, arXiv:2507.07120).
"""

from dataclasses import dataclass
from math import gcd

from bmburst.errors import UserError, require_known
from bmburst.schedule.tiles import Span

CACHES = ("auto", "heads", "tokens")
"""Names of the splits. "auto" splits by heads where the ranks can share the KV heads."""


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """One rank's part of a KV cache.

    Position p of a sequence belongs to token group `p % token_groups`, so that groups have equal numbers of tokens for
    any lengths of prompts, turns and answers.

    Attributes:
        ranks: Ranks that share the cache.
        rank: This rank.
        heads: Query heads of the model.
        kv_heads: KV heads of the model.
        head_groups: Groups of KV heads; divides `ranks` and `kv_heads`.
    """

    ranks: int
    rank: int
    heads: int
    kv_heads: int
    head_groups: int

    @classmethod
    def choose(cls, cache: str, ranks: int, rank: int, heads: int, kv_heads: int) -> "CacheSplit":
        """Return the split of that name.

        Args:
            cache: One of `CACHES`. "heads" splits the KV heads into as many groups as possible, and the tokens among
                the ranks with the same heads; "tokens" splits the tokens only.
            ranks: Ranks that share the cache.
            rank: This rank.
            heads: Query heads of the model.
            kv_heads: KV heads of the model.

        Raises:
            UserError: The name is unknown, or "heads" was requested and the ranks cannot split the KV heads.
        """
        require_known("cache", cache, CACHES)
        groups = 1 if cache == "tokens" else gcd(ranks, kv_heads)
        if cache == "heads" and groups == 1 < ranks:
            works = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
            raise UserError(
                f"cache 'heads' cannot split {kv_heads} KV heads over {ranks} ranks\n"
                f"allowed: ranks that share a divisor with {kv_heads}, for example {works}\n"
                "fix: --cache tokens (or auto), or another number of ranks"
            )
        return cls(ranks, rank, heads, kv_heads, groups)

    @property
    def token_groups(self) -> int:
        """Number of token groups."""
        return self.ranks // self.head_groups

    @property
    def strategy(self) -> tuple[str, int | None]:
        """The attention strategy of a prompt, and its Ulysses degree: each group computes the tokens that it caches."""
        if self.token_groups == 1:
            return "heads", None
        return ("ring", None) if self.head_groups == 1 else ("heads+ring", self.head_groups)

    @property
    def head_group(self) -> int:
        """This rank's group of KV heads."""
        return self.rank % self.head_groups

    @property
    def token_group(self) -> int:
        """This rank's group of tokens."""
        return self.rank // self.head_groups

    @property
    def own_heads(self) -> int:
        """Query heads that this rank decodes with."""
        return self.heads // self.head_groups

    @property
    def own_kv_heads(self) -> int:
        """KV heads that this rank keeps."""
        return self.kv_heads // self.head_groups

    @property
    def name(self) -> str:
        """The name of this split: "heads", "tokens" or "heads x tokens"."""
        if self.token_groups == 1:
            return "heads"
        return "tokens" if self.head_groups == 1 else "heads x tokens"

    def tokens(self, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence this rank's token group keeps."""
        return max(0, -(-(length - self.token_group) // self.token_groups))

    def share(self, size: int) -> Span:
        """Return this rank's part of `size` items that all ranks divide as evenly as possible."""
        return Span(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def nbytes(self, layers: int, sequences: int, length: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of the cache on this rank, for a capacity of `length` tokens in each sequence."""
        return 2 * layers * sequences * self.capacity(length) * self.own_kv_heads * head_dim * itemsize

    def capacity(self, length: int) -> int:
        """Return the rows of a sequence in each rank's memory, the same on every rank.

        With several token groups there is one spare row: a rank writes a new token before it knows the token's owner.
        """
        return -(-length // self.token_groups) + (self.token_groups > 1)
