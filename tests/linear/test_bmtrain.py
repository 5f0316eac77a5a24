"""Recurrent layers in a BMTrain program, over its communicator."""

from bmburst.comm.groups import communicator
from tests import lazy
from tests.distributed.programs import on_program
from tests.linear.split import compare


@on_program(2)
def test_over_bmtrain():
    world = communicator(lazy.bmt.config["comm"])
    for kind in ("gated_delta", "conv"):
        compare(world, kind, ((4, 1, 15, 3),), "zigzag")
