"""Documents of a batch, in all ways in which a batch says where they begin, against each document alone.

Also samples with fewer tokens than ranks, and keys of a batch that are refused.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from bmburst import Documents
from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.transformers import SplitSequences, register
from bmburst.integrations.transformers_batch import BATCH_KEYS, READ
from bmburst_ops import IGNORE_INDEX
from tests import tiny
from tests.distributed.threads import mesh_of, on_ranks, run_ranks
from tests.refusals import refused

CLOSE = 1e-5
DRAWN = torch.randint(61, (2, 31), generator=torch.Generator().manual_seed(4))
PAD = 0
# Rows of (number of the document, tokens); number 0 is padding.
Rows = tuple[tuple[tuple[int, int], ...], ...]


def make(attention: str, dtype: torch.dtype, **changes: Any) -> Any:
    options: dict[str, Any] = {"head_dim": 8, "sliding_window": 7} | changes
    return tiny.transformers_model("mistral", attention=attention, **options).to(dtype)


def numbered(rows: Rows) -> Tensor:
    return torch.tensor([[number for number, tokens in row for _ in range(tokens)] for row in rows])


def restarting(rows: Rows, *, padding: int = 0) -> Tensor:
    return torch.tensor([[i if number else padding for number, tokens in row for i in range(tokens)] for row in rows])


def ids_of(rows: Rows) -> Tensor:
    numbers = numbered(rows)
    return DRAWN[: len(rows), : numbers.shape[1]].masked_fill(numbers == 0, PAD)


@cache
def alone(rows: Rows) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the unsharded model for each document alone."""
    model = make("eager", torch.float64).eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, numbers, row in zip(ids_of(rows), numbered(rows), rows, strict=True):
        for number, tokens in row:
            if number:
                document = ids[numbers == number]
                logits = model(document[None], use_cache=False).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
                count += tokens - 1
    (total / count).backward()
    return total.item() / count, {name: parameter.grad for name, parameter in model.named_parameters()}


def flat(rows: Rows) -> dict[str, Tensor]:
    lengths = [tokens for row in rows for _, tokens in row]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": max(lengths), "max_length_k": max(lengths)}


PACKED: Rows = (((1, 5), (2, 1), (3, 17), (4, 6)),)
TWO: Rows = (((1, 5), (2, 24)), ((1, 20), (2, 1), (3, 8)))
PADDED: Rows = (((1, 11), (2, 17), (0, 1)),)
LEFT: Rows = (((0, 3), (1, 9), (2, 17)), ((1, 13), (2, 11), (0, 5)))
BETWEEN: Rows = (((1, 11), (0, 2), (2, 13), (0, 3)),)
BEHIND: Rows = (((1, 4), (2, 26), (0, 1)), ((1, 4), (2, 26), (0, 1)))
ALIKE: Rows = (((1, 5), (2, 19), (3, 7)),) * 2
EITHER: Rows = (((0, 6), (1, 25)), ((1, 26), (0, 5)))
EARLIER: Rows = (((3, 4), (1, 12), (7, 13)),)
CASES: dict[str, tuple[Rows, dict[str, Any]]] = {
    "one row of positions": (ALIKE, {"position_ids": restarting(ALIKE)[:1]}),
    "documents and padding behind": (BEHIND, {"documents": Documents((4, 26))}),
    "padding on either side": (EITHER, {"attention_mask": (numbered(EITHER) > 0).long()}),
    "positions and one token of padding": (
        PADDED,
        {"position_ids": restarting(PADDED), "attention_mask": (numbered(PADDED) > 0).long()},
    ),
    "positions and padding on either side": (
        LEFT,
        {"position_ids": restarting(LEFT, padding=1), "attention_mask": (numbered(LEFT) > 0).long()},
    ),
    "positions and padding between": (
        BETWEEN,
        {"position_ids": restarting(BETWEEN), "attention_mask": (numbered(BETWEEN) > 0).long()},
    ),
    "positions, padding and all labels": (
        LEFT,
        {"position_ids": restarting(LEFT), "attention_mask": (numbered(LEFT) > 0).long(), "labels": ids_of(LEFT)},
    ),
    "numbers and all labels": (PADDED, {"attention_mask": numbered(PADDED), "labels": ids_of(PADDED)}),
    "numbers on either side": (LEFT, {"attention_mask": numbered(LEFT)}),
    "numbers and padding between": (BETWEEN, {"attention_mask": numbered(BETWEEN)}),
    "numbers in any order": (EARLIER, {"attention_mask": numbered(EARLIER).float()}),
    "numbers and positions": (PADDED, {"attention_mask": numbered(PADDED), "position_ids": restarting(PADDED)}),
    "positions from 2": (PACKED, {"position_ids": restarting(PACKED) + 2}),
    "cumulative lengths": (PACKED, flat(PACKED)),
    "cumulative lengths and positions": (PACKED, flat(PACKED) | {"position_ids": restarting(PACKED)}),
    "cumulative lengths of two samples": (TWO, flat(TWO)),
    "indices": (TWO, {"seq_idx": numbered(TWO).int()}),
}


def require_alone(comm: CheckedCommunicator, rows: Rows, batch: dict[str, Any], layout: str) -> None:
    """Compare loss and gradients of a batch with those of each document alone."""
    loss, gradients = alone(rows)
    split = SplitSequences(mesh_of(comm), layout=layout)
    model = make("bmburst", torch.float64).eval()
    ours = split.part(ids_of(rows), **batch).loss(model)
    ours.backward()
    assert split.mean(ours.detach()) == pytest.approx(loss, rel=CLOSE)
    for name, parameter in model.named_parameters():
        (total,) = comm.all_reduce(parameter.grad).wait()
        expected = gradients[name]  # that of a query is 0 if it sees one key
        assert float((total / comm.size - expected).norm()) < CLOSE * max(float(expected.norm()), 1e-6), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_document_is_as_alone(size: int) -> None:
    register()

    def body(comm: CheckedCommunicator) -> None:
        for i, (name, (rows, batch)) in enumerate(CASES.items()):
            try:
                require_alone(comm, rows, batch, ("zigzag", "striped", "contiguous")[i % 3])
            except AssertionError as error:
                raise AssertionError(name) from error

    run_ranks(size, body)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
@on_ranks(3)
def test_positions_behind_padding_are_those_of_transformers(comm: CheckedCommunicator, family: str) -> None:
    """OPT counts the tokens of the attention_mask; GPT-2 counts padding, too."""
    register()
    sizes = {"word_embed_proj_dim": 24, "ffn_dim": 40, "dropout": 0.0} if family == "opt" else {}
    theirs, ours = (tiny.transformers_model(family, attention=each, **sizes).eval() for each in ("sdpa", "bmburst"))
    mask = torch.ones_like(DRAWN)
    mask[0, :5], mask[1, 29:] = 0, 0
    split = SplitSequences(mesh_of(comm))
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    for given in ({}, {"position_ids": torch.arange(31)[None].expand(2, -1)}, {"position_ids": counted}):
        expected = theirs(DRAWN, attention_mask=mask, use_cache=False, **given).logits
        part = split.part(DRAWN, attention_mask=mask, **given)
        found = part.whole(part.logits(ours))
        torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=1e-4, atol=1e-5)


def test_a_collators_bounds() -> None:
    """As transformers' collator returns them, with and without position ids."""
    rows = [{"input_ids": DRAWN[0, :n].tolist()} for n in (7, 1, 12)]
    found = []
    for positions in (True, False):
        collator = DataCollatorWithFlattening(
            return_position_ids=positions, return_flash_attn_kwargs=True, return_seq_idx=True
        )
        part = SplitSequences(mesh_of()).part(**collator(rows))
        found.append((part.mask.documents, part.position_ids.tolist(), part.labels.tolist()))
    assert found[0] == found[1] and found[0][0] == (Documents((7, 1, 12)),)


IDS = DRAWN[:, :12]
_HALVES = torch.tensor([[1] * 6 + [2] * 6] * 2)
_POSITIONS = torch.tensor([[*range(6)] * 2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_idx": _HALVES, "position_ids": torch.arange(12)[None]}, "position_ids | seq_idx | token 6 | leave one"),
        (
            {"attention_mask": _HALVES, "position_ids": torch.arange(12)[None]},
            "position_ids | attention_mask | token 6",
        ),
        ({"cu_seq_lens_q": [0, 5, 12, 24], "position_ids": _POSITIONS}, "position_ids | cu_seq_lens_q | token 5"),
        ({"cu_seq_lens_q": [0, 6, 12, 24], "cu_seq_lens_k": [0, 12, 24]}, "cu_seq_lens_q | cu_seq_lens_k | token 6"),
        ({"cu_seq_lens_q": [0, 12]}, "cu_seq_lens_q | 12 | 2 x 12 | allowed: | fix: "),
        ({"cu_seq_lens_q": [0, 13, 24]}, "cu_seq_lens_q | two samples | allowed: | fix: "),
        ({"cu_seq_lens_q": [0, 12, 24], "max_length_q": 11}, "max_length_q | 11 | 12 tokens | fix: "),
        ({"cu_seq_lens_q": [12, 24]}, "cu_seqlens | start at 0 | fix: "),
        ({"seq_idx": _HALVES[:, :5]}, "seq_idx | [2, 12] | [2, 5]"),
        ({"seq_idx": _HALVES.to("meta")}, "seq_idx | numbers | meta tensor"),
        ({"seq_idx": _HALVES, "documents": Documents((6, 6))}, "documents | seq_idx | leave seq_idx out"),
        ({"attention_mask": -_HALVES}, "attention_mask | 0 and 1 | numbers of documents | allowed: "),
        ({"token_type_ids": IDS * 0}, "token_type_ids | cannot use | allowed: | cu_seq_lens_q | fix: | collator"),
        ({"loss_weights": IDS * 0.5}, "loss_weights | cannot use | fix: "),
        ({"sequence_length": [5, 7]}, "sequence_length | cannot use | fix: "),
        ({"shift_labels": IDS}, "shift_labels | cannot use | fix: "),
    ],
)
def test_contradictions_and_unknown_keys(options: dict[str, Any], words: str) -> None:
    for size in (1, 2):
        run_ranks(size, lambda comm: _is_refused(comm, options, words))


def _is_refused(comm: CheckedCommunicator, options: dict[str, Any], words: str) -> None:
    with refused(words):
        SplitSequences(mesh_of(comm)).part(IDS, **options)


def test_keys_without_an_effect_and_those_that_say_nothing() -> None:
    part = SplitSequences(mesh_of()).part
    plain = part(IDS)
    others = {name: IDS for name, done in BATCH_KEYS.items() if done != READ}
    assert len(others) > 2
    for found in (part(IDS, **others), part(IDS, token_type_ids=None, seq_idx=None)):
        assert found.mask.documents == plain.mask.documents and torch.equal(found.labels, plain.labels)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_samples_with_fewer_tokens_than_ranks_are_padded(layout: str) -> None:
    register()

    def body(comm: CheckedCommunicator) -> None:
        for rows in ((((1, 2),),), (((1, 3),), ((1, 3),)), (((1, 2), (0, 1)),)):
            batch = {"attention_mask": (numbered(rows) > 0).long()} if "0" in str(rows) else {}
            require_alone(comm, rows, batch, layout)
        split, model = SplitSequences(mesh_of(comm), layout=layout), make("bmburst", torch.float64)
        part = split.part(IDS[:1, :1])
        loss = part.loss(model)
        loss.backward()
        assert math.isnan(split.mean(loss.detach())) and (part.labels == IGNORE_INDEX).all()
        assert all(not bool(parameter.grad.any()) for parameter in model.parameters())

    run_ranks(5, body)
