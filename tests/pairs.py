"""Which combinations of parameters `make test` runs; `make test-long` runs the others.

@pytest.mark.parametrize(("size", "layout", "mask"), pairwise([1, 2, 3], LAYOUTS, ["causal", "full"]))
@pytest.mark.parametrize(("head_dim", "dtype"), in_turn([64, 128, 256], DTYPES))
"""

import re
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, int, int, int]
Cases = list[Any]
"""What `pytest.mark.parametrize` takes. The cases that are not of the smaller set are marked long."""


def pairwise(*axes: Iterable[Any]) -> Cases:
    """Return all combinations of the values of some parameters. Any two values meet in one that is not long.

    So a fault that depends on one or two of the parameters is found without the long ones.

    Args:
        axes: The values of each parameter. A tuple holds values of several, which belong together.
    """
    values = [list(axis) for axis in axes]
    indices = list(product(*(range(len(axis)) for axis in values)))
    pairs = {case: _pairs(case) for case in indices}
    missing, chosen = set[Pair]().union(*pairs.values()), set()
    while missing:
        best = max(indices, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [_case(values, case, is_long=case not in chosen) for case in indices]


def in_turn(*axes: Iterable[Any]) -> Cases:
    """Return all combinations of the values of some parameters. Each value is in one that is not long."""
    values = [list(axis) for axis in axes]
    chosen = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    indices = product(*(range(len(axis)) for axis in values))
    return [_case(values, case, is_long=case not in chosen) for case in indices]


def long(*cases: Any) -> Cases:
    """Return cases, all marked long; a tuple holds the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def part(text: str) -> tuple[int, int]:
    """Return K and N of `--part K/N`, the part of the long tests that is to run.

    Raises:
        pytest.UsageError: It is not two whole numbers of which the second is not the smaller one.
    """
    found = re.fullmatch(r"0*([1-9]\d*)/0*([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part is {text!r}, allowed: K/N with K from 1 to N, as PART=1/3 of make test-long")
    return int(found[1]), int(found[2])


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of a parameter in those tests of a module that are to run: what its fixture has to make.

    Args:
        request: Of a fixture of the module.
        name: Of the parameter, a test's or a fixture's.
    """
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(case[name] for case in cases if name in case))


def _pairs(case: tuple[int, ...]) -> set[Pair]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def _case(values: list[list[Any]], case: tuple[int, ...], *, is_long: bool) -> Any:
    parts = [axis[index] for axis, index in zip(values, case, strict=True)]
    flat = [value for part in parts for value in (part if isinstance(part, tuple) else (part,))]
    return pytest.param(*flat, marks=pytest.mark.long if is_long else ())
