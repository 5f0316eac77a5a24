"""Ranks that disagree are told what differs, and nothing else."""

import pytest

from bmburst.comm.checks import NBYTES, decoded, disagreement, encoded
from tests.refusals import says

CALL = "burst_attention\nq float32[1, 6, 2, 8]\nmask causal\nlayout zigzag\nscale 0.5"


def test_equal_signatures_are_no_disagreement():
    assert disagreement([]) is None
    assert disagreement([CALL] * 3) is None


def test_only_what_differs_is_shown_of_the_first_rank_that_differs():
    other = CALL.replace("causal", "full").replace("zigzag", "striped")
    assert says(disagreement([CALL, CALL, other, "ring"]), "disagree", "fix: ", "same value").splitlines()[1:] == [
        "rank 0: burst_attention mask causal, layout zigzag",
        "rank 2: burst_attention mask full, layout striped",
    ]


@pytest.mark.parametrize(
    ("one", "other", "fix"),
    [
        ("shard\ncontents #00000001", "shard\ncontents #00000002", "sampler by data-parallel rank"),
        ("weight\nvalues #00000001", "weight\nvalues #00000002", "same weights"),
        ("batch\ndocuments one", "batch\ndocuments 3, 4", "sampler by data-parallel rank"),
        (CALL, CALL.replace("6", "8"), "equal shapes and dtypes"),
        ("batch\nshape [2, 8]", "batch\nshape [1, 8]", "equal shapes and dtypes"),
        (f"{CALL}\nwith gradient", f"{CALL}\nwithout gradient", "grad mode"),
        ("ring\nint64[2]\nbackward of call 1", "ring\nint64[2]\nbackward of call 2", "backward of the same calls"),
        (CALL, "ring shift=1", "same calls in the same order"),
        (CALL, CALL.replace("causal", "full"), "same value"),
    ],
)
def test_the_fix_is_named(one, other, fix):
    first, *rest = disagreement([one, one, other]).splitlines()
    assert len(rest) == 2
    assert fix in first.partition("; fix: ")[2]


def test_different_calls_are_shown_without_what_they_are_given():
    assert disagreement([CALL, "ring shift=1\nfloat32[2]"]).splitlines()[1:] == [
        "rank 0: burst_attention",
        "rank 1: ring shift=1",
    ]


def test_a_fact_that_one_rank_alone_has_is_shown():
    assert disagreement([CALL, f"{CALL}\nnodes 2"]).endswith("rank 1: burst_attention nodes 2")


def test_a_long_fact_is_shown_from_where_it_differs():
    same = " ".join(f"word{i}" for i in range(40))
    shown = disagreement([f"batch\ndocuments {same} a {same}", f"batch\ndocuments {same} b {same}"]).splitlines()
    assert shown[1].startswith("rank 0: batch documents ... a word0")
    assert shown[2].startswith("rank 1: batch documents ... b word0")
    assert max(map(len, shown[1:])) < 120


def test_of_a_long_word_the_end_is_shown():
    shown = disagreement([f"call\nname {'x' * 150}{end}" for end in (1, 2)]).splitlines()
    assert shown[1].endswith("xxx1")
    assert shown[2].endswith("xxx2")
    assert max(map(len, shown[1:])) < 120


@pytest.mark.parametrize("facts", [1, 5, 30])
def test_many_differences_stay_short(facts):
    one, other = ("\n".join(["call", *(f"name{i} {letter * 70}" for i in range(facts))]) for letter in "ab")
    shown = disagreement([one, other]).splitlines()
    assert len(shown) == 3
    assert all(len(line) < 240 for line in shown)


@pytest.mark.parametrize("where", [0, 3000, 6999])
def test_what_is_too_long_to_send_still_differs_and_says_in_which_fact(where):
    letters = ["x"] * 7000
    one = decoded(encoded(f"{CALL}\nlong {''.join(letters)}\nlast 1"))
    letters[where] = "y"
    other = decoded(encoded(f"{CALL}\nlong {''.join(letters)}\nlast 1"))
    assert len(encoded(CALL + "x" * 7000)) == NBYTES
    shown = disagreement([one, other]).splitlines()
    assert all(line.startswith(f"rank {rank}: burst_attention long ") for rank, line in enumerate(shown[1:]))
    assert shown[1][8:] != shown[2][8:]
    assert disagreement([one, one.replace("last 1", "last 2")]).endswith("rank 1: burst_attention last 2")


def test_a_text_that_fits_arrives_as_it_is():
    assert decoded(encoded(CALL)) == CALL
    assert decoded(encoded("n" * NBYTES)) == "n" * NBYTES
    assert len(encoded("\n".join("\u00e9" * 50 for _ in range(90)))) == NBYTES
