"""Which rank stands where, and what cannot be dealt to the ranks: by brute force over small worlds."""

import math
import re
from itertools import product

import pytest

from bmburst.schedule.layout import make_layout
from bmburst.schedule.parallelism import MeshShape, divisors
from bmburst.schedule.units import HeadShapes
from tests.refusals import refusal_of, refused, says

AXES = [axes for axes in product(range(1, 4), repeat=4) if math.prod(axes) <= 24]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_rank_has_its_place(axes):
    pipe, data, sequence, tensor = axes
    shape = MeshShape.fit(math.prod(axes), data, tensor=tensor, pipe=pipe)
    assert shape == MeshShape(data, sequence, tensor, pipe=pipe)
    assert shape == MeshShape.fit(shape.size, sequence=sequence, tensor=tensor, pipe=pipe)
    places = [(rank // shape.stage_size, *shape.coordinates(rank)) for rank in range(shape.size)]
    assert places == list(product(*map(range, axes)))  # tensor ranks are neighbours, and those of a stage
    for axis, groups in enumerate((shape.data_groups(), shape.sequence_groups(), shape.tensor_groups()), start=1):
        assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
        for group in groups:
            assert [places[rank][axis] for rank in group] == list(range(axes[axis]))
            others = {places[rank][:axis] + places[rank][axis + 1 :] for rank in group}
            assert len(others) == 1


def test_inside_a_sequence():
    shape = MeshShape.fit(16, data=1, tensor=2, heads=2, nodes=2)
    assert (shape.sequence, shape.heads, shape.nodes) == (8, 2, 2)
    assert (MeshShape.fit(4).heads, MeshShape.fit(4).nodes) == (None, 1)
    says(refusal_of(MeshShape.fit, 8, nodes=3), "nodes 3", "8 sequence ranks", "2 and 4")
    says(refusal_of(MeshShape.fit, 12, nodes=2, heads=4), "heads 4", "6 sequence ranks", "3 and 6")
    says(refusal_of(MeshShape.fit, 8, heads=0), "heads 0")
    says(refusal_of(MeshShape.fit, 8, nodes=16), "nodes 16", "8 sequence ranks")


def test_axes_that_do_not_multiply_are_refused():
    says(refusal_of(MeshShape.fit, 12, tensor=5), "tensor 5 | 12 ranks | nearest that work: 4 and 6")
    assert "data 2 x sequence 2 with tensor 2" in refusal_of(MeshShape.fit, 12, 2, 2, tensor=2)
    assert "each one of 1, 2, 3, 6" in refusal_of(MeshShape.fit, 12, 5, tensor=2)
    says(refusal_of(MeshShape.fit, 12, pipe=5), "pipe 5 | 12 ranks | nearest that work: 4 and 6")
    says(refusal_of(MeshShape.fit, 12, pipe=3, tensor=3), "tensor 3 | 4 ranks of a stage | nearest that work: 2 and 4")
    assert "with pipe 2" in refusal_of(MeshShape.fit, 12, 5, pipe=2)
    assert "data 1 x sequence 3" in refusal_of(MeshShape.fit, 2, sequence=3)
    assert refusal_of(MeshShape.fit, 8, sequence="2").startswith("sequence of a mesh must be a whole number, got '2'")
    assert refusal_of(MeshShape.fit, 8, tensor=None).startswith("tensor of a mesh must be a whole number, got None")
    assert "data 1 x sequence 2 x tensor 0" in refusal_of(MeshShape, 1, 2, 0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 3), (12, 1), (5, 5), (32, 8)])
def test_heads_are_dealt_where_attention_can_deal_them(heads, kv_heads):
    """As attention's own exchange of heads has it; and a rank's KV heads are those of its query heads."""

    def works(degree, heads, kv_heads):
        shapes = HeadShapes(
            layout=make_layout("zigzag", degree, 4),
            degree=degree,
            batch=1,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=8,
            itemsize=4,
            statistics_itemsize=4,
        )
        return shapes.refusal() is None

    good = [degree for degree in range(1, heads + 2) if works(degree, heads, kv_heads)]
    for degree in range(1, heads + 2):
        tensor, exchange = MeshShape(1, 1, degree), MeshShape(1, degree, heads=degree)
        if degree not in good:
            near = [n for n in good if n < degree][-1:] + [n for n in good if n > degree][:1]
            said = refusal_of(tensor.require_heads, heads, kv_heads)
            says(said, f"tensor {degree}", f"{heads} query heads", f"{kv_heads} KV heads")
            assert [int(n) for n in re.findall(r"\d+", said.splitlines()[1])] == near
            says(refusal_of(exchange.require_heads, heads, kv_heads), f"heads {degree}", f"{heads} query heads")
            continue
        own, own_kv = tensor.require_heads(heads, kv_heads)
        assert exchange.require_heads(heads, kv_heads) == (heads, kv_heads)
        for rank in range(degree):
            needed = {head // (heads // kv_heads) for head in range(rank * own, (rank + 1) * own)}
            assert needed == {rank * kv_heads // degree + n for n in range(own_kv)}


def test_heads_over_both_axes():
    shape = MeshShape(1, 6, tensor=2, heads=3)
    says(refusal_of(shape.require_heads, 8, 8), "heads 3", "4 query heads", "4 KV heads", "work: 2")
    assert shape.require_heads(12, 2) == (6, 1)
    assert shape.require_width("intermediate_size", 40) == 20
    says(refusal_of(shape.require_width, "intermediate_size", 41), "tensor 2", "intermediate_size 41", "1 and 41")
    for number in (0, 1, 7, 12, 36):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    for heads, words in (((10**20, 1), "query heads | at most"), ((4, 0), "KV heads | least 1"), (("4", 4), "'4'")):
        says(refusal_of(shape.require_heads, *heads), words, "fix: ")
    says(refusal_of(shape.require_width, "intermediate_size", 10**20), "intermediate_size", "at most")
    assert shape.require_heads(6 * 10**14, 2) == (3 * 10**14, 1)


def test_mesh_shape_names_what_would_fit():
    assert MeshShape.fit(6, data=2) == MeshShape(2, 3)
    assert MeshShape.fit(6) == MeshShape(1, 6)
    assert MeshShape.fit(6, sequence=3) == MeshShape(2, 3)
    assert MeshShape(2, 3).sequence_groups() == [[0, 1, 2], [3, 4, 5]]
    assert MeshShape(2, 3).data_groups() == [[0, 3], [1, 4], [2, 5]]
    for data, sequence in ((4, None), (2, 2), (0, None), (None, 5), (None, 0), (-2, -3)):
        axes = {"data": data, "sequence": sequence}
        with refused("6 ranks", *(f"{axis} {n}" for axis, n in axes.items() if n is not None), "1, 2, 3, 6"):
            MeshShape.fit(6, data, sequence)
    for axes, words in (((0, 2), "data 0 x sequence 2"), ((2**10, 2**7), "data 1024 x sequence 128 | 65,536")):
        with refused("at least 1 rank | fix: ", words):
            MeshShape(*axes)
    for size in (0, -4, 10**20):
        with refused(f"world_size {size} | 1 to 65,536"):
            MeshShape.fit(size)
    for rank in (6, -1, "0"):
        with refused(f"rank {rank!r} | 6 ranks | 0 to 5"):
            MeshShape(2, 3).coordinates(rank)


@pytest.mark.parametrize("axis", ["data", "sequence", "tensor", "heads", "nodes"])
@pytest.mark.parametrize("value", ["1", 1.0, True, 2.5, [1]])
def test_an_axis_is_a_whole_number(axis, value):
    words = (axis, "whole number", repr(value), "at least 1")
    says(refusal_of(MeshShape, **({"data": 1, "sequence": 4} | {axis: value})), *words)
    says(refusal_of(MeshShape.fit, 4, **{axis: value}), *words)
    says(refusal_of(MeshShape.fit, "4"), "world_size", "whole number", "'4'", "at least 1")
