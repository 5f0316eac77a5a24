"""The choices that are left to the tuner of flash-linear-attention."""

from types import SimpleNamespace

from benchmarks.fla_tuning import Choice, nearest


def test_the_fastest_choice_of_a_kernel_comes_first_if_the_kernel_has_it():
    usual, small, wide = (
        SimpleNamespace(kwargs={"BK": block}, num_warps=warps, num_stages=3)
        for block, warps in ((64, 4), (32, 1), (128, 4))
    )
    assert nearest([wide, small, usual], None) == [usual, wide, small]
    assert nearest([wide, usual, small], Choice({"BK": 32}, 1, 3)) == [small, usual, wide]
    assert nearest([wide, usual, small], Choice({"BK": 32}, 2, 3)) == [usual, wide, small]
