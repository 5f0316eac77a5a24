"""How a KV cache is split over ranks: which heads and which tokens each rank keeps, and the bytes that takes.

The ranks form a grid of head groups x token groups. Rank `t * head_groups + h` keeps the KV heads of head group h for
the tokens of token group t. No head of a token is stored twice. By heads alone (one token group) is what
tensor-parallel decoding needs; more ranks than KV heads give both (Helix, arXiv:2507.07120). Imports no torch.
"""

from dataclasses import dataclass
from math import gcd

from bmburst.errors import UserError, require_known
from bmburst.schedule.tiles import Span

CACHES = ("auto", "heads", "tokens")
"""Names by which users ask for a split. "auto" is by heads where the ranks can share the KV heads."""


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """One rank's part of a KV cache.

    Position p of a sequence belongs to token group `p % token_groups`, so that every group has the same number of
    tokens, whatever the lengths of prompts, turns and answers are.

    Attributes:
        ranks: Ranks that share the cache.
        rank: This one.
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
        """Return the split that a name asks for.

        Args:
            cache: One of `CACHES`. "heads" deals KV heads to as many groups of ranks as it can, and tokens inside of a
                group; "tokens" deals tokens alone.
            ranks: Ranks that share the cache.
            rank: This one.
            heads: Query heads of the model.
            kv_heads: KV heads of the model.

        Raises:
            UserError: The name is unknown, or "heads" was asked for and no group of ranks can share the KV heads.
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
        """Groups of tokens."""
        return self.ranks // self.head_groups

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
        """What this split is called: "heads", "tokens" or "heads x tokens"."""
        if self.token_groups == 1:
            return "heads"
        return "tokens" if self.head_groups == 1 else "heads x tokens"

    def tokens(self, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence this rank's token group keeps."""
        return max(0, -(-(length - self.token_group) // self.token_groups))

    def share(self, size: int) -> Span:
        """Return this rank's part of `size` things that all ranks divide as evenly as they can."""
        return Span(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def nbytes(self, layers: int, sequences: int, length: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of the cache on this rank.

        Args:
            layers: Layers of the model.
            sequences: Sequences that the cache holds.
            length: Tokens that it has room for in each.
            head_dim: Features of a head.
            itemsize: Bytes of a number.
        """
        return 2 * layers * sequences * self.capacity(length) * self.own_kv_heads * head_dim * itemsize

    def capacity(self, length: int) -> int:
        """Return the rows of a sequence in this rank's memory: every rank has as many.

        With token groups one more than its tokens: a rank writes a new token before it knows whose it is.
        """
        return -(-length // self.token_groups) + (self.token_groups > 1)
