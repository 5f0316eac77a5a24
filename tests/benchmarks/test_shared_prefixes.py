"""The benchmark of shared prefixes: its cases, and a run on two CPU ranks."""

import pytest

import bmburst
from benchmarks.shared_prefixes import Case
from bmburst.errors import UserError
from tests.benchmarks.made import measured
from tests.mask_oracle import visible


def test_pairs_and_tokens_of_a_case():
    case = Case.parse("400+3x200")
    assert case == (400, 3, 200) and case.name == "400+3x200"
    rows = [[*range(400), *range(1000 * n, 1000 * n + 200)] for n in (1, 2, 3)]
    packed = bmburst.pack_tree(rows)
    tree = visible(packed.mask, packed.length).sum()
    row = visible(bmburst.Causal(), 600).sum()
    assert case.pairs == (pytest.approx(float(tree), rel=0.01), pytest.approx(3 * float(row), rel=0.01))
    assert case.tokens == (packed.length + 1, 1800)


@pytest.mark.parametrize("text", ["8K", "8K+4", "x+8x4K", "8K+8x4K+1"])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match="8K"):
        Case.parse(text)


@pytest.mark.long
def test_a_tree_and_its_rows_have_the_same_loss(tmp_path):
    words = ["--model", "llama-tiny", "--layers", "1", "--steps", "1", "--cases", "400+3x200"]
    (row,) = measured(tmp_path, 2, "shared-prefixes", *words)[0]["rows"]
    assert row["measured_rows"] == 3
    assert row["tree_loss"] == pytest.approx(row["rows_loss"], rel=1e-6)
