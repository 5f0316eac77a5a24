"""`generate` with a split cache against the unsplit model's own generate, in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import run_processes
from tests.integrations import transformers_generate_program as program
from tests.integrations.transformers_program import FAMILIES, make_model


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What transformers' own attention and cache generate."""
    found = {}
    options: dict[str, Any] = {"max_new_tokens": program.NEW, "min_new_tokens": program.NEW, "do_sample": False}
    for family in FAMILIES:
        model = make_model(family, "eager", torch.float32).eval()
        for length in program.LENGTHS:
            first = model.generate(program.prompt(length), **options)
            found[f"{family} {length}"] = first
            turn = torch.cat((first, program.prompt(5)), 1)
            found[f"{family} {length} turn"] = model.generate(turn, **options)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tokens_equal_transformers(ranks: int, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run_processes(ranks, program.run, tmp_path)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    assert {n: seen[0][n].tolist() for n in expected} == {n: each.tolist() for n, each in expected.items()}
    for other in seen[1:]:
        assert [n for n in seen[0] if n != "nbytes" and not torch.equal(other[n], seen[0][n])] == []
    # the cache of 1000 tokens: keys and values of 2 samples, each rank's share and some room to grow
    one = 2 * 2 * 2 * 8 * 4
    layers_heads = seen[0]["nbytes"] / one / (-(-1000 // ranks) + 64)
    assert layers_heads <= 4
