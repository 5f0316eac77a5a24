"""Models, lengths, methods and cells of `bmburst bench inference`. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.engine.kinds import BaseCell, BaseSelection
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.dtypes import ITEMSIZE
from bmburst.blocks.presets import PRESETS
from bmburst.errors import UserError, require_known
from bmburst.plan.inference import InferenceWork
from bmburst.schedule.hardware import Hardware

_KIB = 1024
# Measured models: the presets, half of the layers of one whose weights do not fit on a GPU, and a small one.
SHAPES: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        **PRESETS,
        "llama-3-70b-x40": replace(PRESETS["llama-3-70b"], num_layers=40),
        # With init_std 0.2, greedy tokens depend on attention, so they show whether methods agree.
        "tiny": replace(PRESETS["llama-tiny"], num_layers=2, head_dim=16, init_std=0.2),
    }
)
CAUSAL, FULL = "causal", "full"
MASKS = (CAUSAL, FULL)
_MASKED = 2e-9  # host seconds per score of a head that the reference kernel masks
WARM_TOKENS, WARM_STEPS = 2048, 4  # tokens of the prompt and of the answer in warm-up


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceMethod:
    """One way to answer prompts."""

    name: str  # name in cells
    cache: str = "heads"  # split of the KV cache over ranks; one of `bmburst.schedule.cache_split.CACHES`
    peer: bool = False  # whether prefill is in `benchmarks.inference.peers` instead of bmburst's
    deals_heads: bool = False  # whether the numbers of query and KV heads must divide by the ranks
    is_materialised: bool = False  # whether attention writes its scores to memory


HEADS, TOKENS, NO_LAO, TENSOR_V1, TENSOR_V3 = "heads", "tokens", "no-lao", "tensor-v1", "tensor-v3"
RING_LI, TRANSFORMERS = "ring-li", "transformers"
METHODS: Mapping[str, InferenceMethod] = MappingProxyType(
    {
        method.name: method
        for method in (
            InferenceMethod(name=HEADS, cache="auto"),
            InferenceMethod(name=TOKENS, cache="tokens"),
            # A ring with the kernel that materialises scores.
            InferenceMethod(name=NO_LAO, cache="tokens", is_materialised=True),
            # Megatron tensor parallelism (arXiv:1909.08053), and with sequence parallelism (arXiv:2205.05198)
            InferenceMethod(name=TENSOR_V1, peer=True, deals_heads=True),
            InferenceMethod(name=TENSOR_V3, peer=True, deals_heads=True),
            # Ring self-attention of Li et al. (arXiv:2105.13120)
            InferenceMethod(name=RING_LI, cache="tokens", peer=True, is_materialised=True),
            InferenceMethod(name=TRANSFORMERS, peer=True),
        )
    }
)


class Suite(NamedTuple):
    """The defaults of a suite."""

    models: Mapping[str, int]  # presets with the length of the longest prompt of each
    first: int = 4 * _KIB  # length of the shortest prompt. Lengths are the powers of two in this range.
    masks: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # of attention in prefill, by preset; others: causal
    batches: tuple[int, ...] = (1,)  # prompts at once


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "prompt": Suite(
            {"llama-2-7b": 256 * _KIB, "llama-2-13b": 256 * _KIB, "llama-3-8b": 1024 * _KIB},
            masks={"llama-2-7b": MASKS, "llama-2-13b": MASKS},
        ),
        "batch": Suite({"llama-3-8b": 4 * _KIB}, batches=(8, 32)),
    }
)


@dataclass(frozen=True, kw_only=True)
class InferenceCell(BaseCell):
    """One measurement: all ranks of the run answer prompts of one length together; `dtype` is of weights and cache."""

    model: str  # a name of `SHAPES`
    tokens: int  # tokens of each prompt
    batch: int = 1  # prompts at once
    mask: str = CAUSAL  # of attention in prefill; one of `MASKS`
    new_tokens: int = 24  # tokens of each answer

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return SHAPES[self.model]

    @property
    def work(self) -> InferenceWork:
        """FLOPs and bytes of the cell, for its bounds."""
        return InferenceWork(
            config=self.config, batch=self.batch, itemsize=ITEMSIZE.get(self.dtype, 2), is_causal=self.mask == CAUSAL
        )

    @property
    def name(self) -> str:
        """For example `prompt/llama-3-8b/131072/causal/heads` or `batch/llama-3-8b/8x4096/causal/heads`."""
        tokens = f"{self.batch}x{self.tokens}" if self.suite == "batch" else f"{self.tokens}"
        return f"{self.suite}/{self.model}/{tokens}/{self.mask}/{self.method}"

    def refusal(self) -> str | None:
        """Return why the cell cannot run, as far as its shape and ranks determine that, or None."""
        method, config = METHODS[self.method], self.config
        if self.method == TRANSFORMERS and self.ranks > 1:
            return "transformers' own generate runs on one rank"
        if self.method == TRANSFORMERS and self.mask == FULL:
            return "transformers' own generate has a causal mask"
        if self.mask == FULL and self.batch > 1:
            return "without a mask one prompt is measured at a time"
        if method.deals_heads and (config.num_heads % self.ranks or config.num_kv_heads % self.ranks):
            return f"{config.num_heads} query and {config.num_kv_heads} KV heads do not divide by {self.ranks} ranks"
        if method.peer and self.method != TRANSFORMERS and config.sliding_window is not None:
            return "this method has no sliding window"
        return None

    def seconds(self, hardware: Hardware) -> float:
        """Return an approximate lower bound of the seconds of one answer.

        Materialised scores are read or written four times in fp32, with any mask. The reference kernel makes its masks
        on the host.
        """
        work, config = self.work, self.config
        prefill = work.prefill_bound(self.tokens, self.ranks, hardware)
        if METHODS[self.method].is_materialised:
            scores = float(self.tokens) ** 2 * config.num_heads * config.num_layers * self.batch / self.ranks
            prefill += hardware.memory_seconds(4 * 4 * scores)
        if self.method == NO_LAO and self.mask == CAUSAL:  # the tiles of a striped ring all have a mask
            prefill += _MASKED * float(self.tokens) ** 2 / 2 / self.ranks * config.num_layers * self.batch
        return prefill + self.new_tokens * work.decode_bound(self.tokens, self.ranks, hardware)


@dataclass(frozen=True, kw_only=True)
class InferenceSelection(BaseSelection):
    """Selects the cells to list; for None the defaults of the suite apply.

    Raises:
        UserError: A name is unknown, a number is too small, or a length does not divide.
    """

    models: tuple[str, ...] | None = None  # names of `SHAPES`
    masks: tuple[str, ...] | None = None  # names of `MASKS`
    batches: tuple[int, ...] | None = None  # prompts at once; numbers other than 1 belong to the suite "batch"
    new_tokens: int = 24  # tokens of each answer

    def __post_init__(self) -> None:
        for name in self.models or ():
            require_known("model", name, SHAPES)
        for name in self.masks or ():
            require_known("mask", name, MASKS)
        if self.new_tokens < 2:
            raise UserError(
                f"--new-tokens {self.new_tokens}\nallowed: at least 2, the first of which ends prefill\n"
                "fix: for example --new-tokens 24"
            )
        super().__post_init__()


def list_cells(selection: InferenceSelection) -> tuple[InferenceCell, ...]:
    """Return the selected cells, short prompts first. Cells of one model are adjacent and share its weights."""
    found = (cell for ranks in selection.ranks for model in _models(selection) for cell in _of(selection, ranks, model))
    return tuple(cell for cell in found if selection.fits(cell))


def _models(selection: InferenceSelection) -> tuple[str, ...]:
    return selection.models or tuple(dict.fromkeys(model for suite in SUITES.values() for model in suite.models))


def _of(selection: InferenceSelection, ranks: int, model: str) -> Iterator[InferenceCell]:
    for name, suite in SUITES.items():
        if name == "batch" and selection.batches is None and (selection.tokens or model not in suite.models):
            continue  # --tokens alone selects no batches
        if model not in suite.models and selection.models is None:
            continue
        longest = suite.models.get(model, suite.first)
        lengths = tuple(1 << n for n in range(suite.first.bit_length() - 1, longest.bit_length()))
        batches = suite.batches
        if selection.batches is not None:
            batches = tuple(batch for batch in selection.batches if (batch == 1) == (name == "prompt"))
        for tokens, batch, mask, method in product(
            selection.tokens or lengths,
            batches,
            selection.masks or suite.masks.get(model, (CAUSAL,)),
            selection.methods,
        ):
            yield InferenceCell(
                suite=name,
                method=method,
                ranks=ranks,
                device=selection.device,
                dtype=selection.plain_dtype,
                model=model,
                tokens=tokens,
                batch=batch,
                mask=mask,
                new_tokens=selection.new_tokens,
            )
