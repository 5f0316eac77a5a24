"""A rank's part of a batch of sequences with a learned bias, and what all of its layers share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from bmburst.comm.checks import Checked
from bmburst.comm.protocol import Communicator
from bmburst.errors import UserError
from bmburst_ops.biased import Pairs, RelativeBias, Tokens
from bmburst_ops.biased.pairs import Once

HOW_MADE = "fix: take what a position bias of bmburst.integrations.cpm_live returns"


class _Shared:
    """What calls of one batch share; a copy of the batch begins with nothing."""

    def __init__(self) -> None:
        self.whole = Once()
        self.versions: tuple[int, ...] | None = None
        self.pairs: tuple[Pairs, ...] | None = None
        self.decided: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[type["_Shared"], tuple[()]]:
        return _Shared, ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BiasedSequence:
    """This rank's part of a batch of sequences: what attention must know of it beside q, k, v and the bias table.

    Make one for a batch and give it to all layers: what tokens other ranks have and which of them see each other is
    found by the first call, kept here, some 120 bytes a token of the whole sequence, and let go with it. So tensors
    that it was made of must not be changed: attention refuses it then.

    Attributes:
        formula: Which row of the table a query and a key have.
        relations: int32 `[batch or 1, entries]`, the same on every rank of the group.
        tokens: What this rank's tokens are, in the whole sequence.
        group: The ranks that share the sequences.
        kernel: "auto", "triton" or "reference".
        transport: As in `bmburst.burst_attention`.

    Raises:
        UserError: One is of another type.
    """

    formula: RelativeBias
    relations: Tensor
    tokens: Tokens
    group: Checked
    kernel: str = "auto"
    transport: str = "auto"
    _shared: _Shared = field(default_factory=_Shared, init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = {"formula": RelativeBias, "relations": Tensor, "tokens": Tokens, "group": Checked}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise UserError(f"{name} must be a {kind.__name__}, got {type(value).__name__}\n{HOW_MADE}")
        self.require_unchanged()

    @property
    def is_new(self) -> bool:
        """Whether no call has asked for `pairs` yet: the first is collective."""
        return self._shared.pairs is None

    def require_unchanged(self) -> None:
        """Check that nothing was written into the tensors since this was made, or a copy of it first used.

        What was made under `torch.inference_mode` has no count of that.

        Raises:
            UserError: Something was.
        """
        vectors = (getattr(self.tokens, f.name) for f in fields(self.tokens))
        versions = tuple(0 if t.is_inference() else t._version for t in (self.relations, *vectors))
        if self._shared.versions is None:
            self._shared.versions = versions
        if versions != self._shared.versions:
            raise UserError(
                "relations or tokens of a BiasedSequence were changed in place, and layers share what was found of them"
                "\nfix: make new ones for each batch"
            )

    def pairs(self, comm: Communicator) -> tuple[Pairs, ...]:
        """Return what this rank's queries and the keys of each rank are to each other, by rank.

        They are of copies, made at the first call: a collective one.
        """
        shared = self._shared
        relations, whole = shared.whole.get("whole", lambda: self._whole(comm))
        if shared.pairs is None:
            tokens = [Tokens.unpacked(packed) for packed in whole]
            shared.pairs = tuple(Pairs(self.formula, relations, tokens[comm.rank], keys) for keys in tokens)
        return shared.pairs

    def decided(self, kind: Hashable, decide: Callable[[], Any]) -> Any:
        """Return what `decide()` gave for a call of that kind the first time."""
        known = self._shared.decided
        if kind not in known:
            known[kind] = decide()
        return known[kind]

    def _whole(self, comm: Communicator) -> tuple[Tensor, Tensor]:
        """Return relations, and all ranks' tokens, `[ranks, 6, batch, local_tokens]`, in memory of their own."""
        (whole,) = comm.all_gather(self.tokens.packed()).wait()
        return self.relations.clone(), whole
