"""What a rank keeps for itself of an exchange, against bytes copied one row after the other."""

import random

import pytest
import torch

from bmburst.comm.memory import copy_own
from bmburst.schedule.exchange import Block, Move, make_exchange


def copied(moves, sources, target):
    """Return the target's bytes after each row was copied by itself."""
    wanted = bytearray(target.tolist())
    for source, into in moves:
        held = sources[source.buffer].tolist()
        for row in range(source.rows):
            here, there = source.offset + row * source.pitch, into.offset + row * into.pitch
            wanted[there : there + into.width] = bytes(held[here : here + source.width])
    return list(wanted)


def random_bytes(rng, size, skipped):
    """Return memory that itself begins so many bytes behind an aligned one."""
    return torch.frombuffer(bytearray(rng.randbytes(skipped + size)), dtype=torch.uint8, offset=skipped)


def part(memory, first):
    """Return a tensor that begins at a byte of its storage."""
    return memory[first:]


@pytest.mark.parametrize("first", [0, 1, 2, 4, 8, 15, 16])
@pytest.mark.parametrize("unit", [1, 4, 16])
def test_blocks_in_any_order_from_any_byte(first, unit):
    """Blocks of equal shape at like distances may be copied as one, but none that only looks so."""
    rng = random.Random(first * 100 + unit)
    for _ in range(40):
        skipped = rng.choice([0, 1, 8])
        *sources, target = (part(random_bytes(rng, 4096 + first, skipped), first) for _ in range(3))
        moves, at = [], 0
        for _ in range(rng.randint(1, 6)):
            width, rows = unit * rng.choice([1, 1, 1, 3]), rng.choice([1, 2, 2, 3])
            pitches = [width + unit * rng.choice([0, 1]) for _ in range(2)]
            places = [unit * rng.randrange((2048 - rows * max(pitches)) // unit), at]
            at += rows * pitches[1] + unit * rng.choice([0, 0, 2])
            moves.append(
                Move(
                    Block(places[0], width, rows, pitches[0], rng.randrange(2)),
                    Block(places[1], width, rows, pitches[1]),
                )
            )
        rng.shuffle(moves)
        wanted = copied(moves, sources, target)
        exchange = make_exchange(0, 1, 4096, lambda _, __, moves=moves: moves)
        copy_own(exchange, sources, [target])
        assert target.tolist() == wanted


def test_two_parts_of_a_zigzag_are_one_copy(monkeypatch):
    calls, real = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, what: calls.append(len(into)) or real(into, what))
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    moves = [Move(Block(0, 8, 2, 16), Block(0, 8, 2, 8)), Move(Block(32, 8, 2, 16), Block(48, 8, 2, 8))]
    copy_own(make_exchange(0, 1, 64, lambda *_: moves), [source], [target])
    assert calls == [1]
    assert target.view(8, 8)[[0, 1, 6, 7], 0].tolist() == [0, 16, 32, 48] and target[16:48].sum() == 0


def test_nothing_to_keep_copies_nothing(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    copy_own(make_exchange(0, 1, 64, lambda *_: []), [], [])
