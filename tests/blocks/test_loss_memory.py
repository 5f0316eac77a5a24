"""What of the tables is there while the loss is formed, the fullest moment of many a step: the head alone."""

import weakref
from dataclasses import replace

import pytest

from bmburst.blocks.presets import PRESETS
from tests import lazy
from tests.distributed.programs import on_program

MODEL = replace(PRESETS["llama-tiny"], num_layers=1)


@on_program(1, fresh=True)
def test_an_embedding_that_is_not_the_head_is_gone():
    for tied in (False, True):
        assert embedding_lives(tied) is tied


def embedding_lives(tied):
    import torch

    from bmburst.blocks import model as blocks

    llama = blocks.Llama(replace(MODEL, tie_embeddings=tied), attention=lazy.BurstAttention)
    look_up, loss_of, given, alive = blocks.rows_of, blocks.token_loss_sum, [], []

    def rows_of(ids, table, **options):
        given.append(weakref.ref(table))
        return look_up(ids, table, **options)

    def token_loss_sum(*args, **options):
        alive.append(given[0]() is not None)
        return loss_of(*args, **options)

    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "rows_of", rows_of)
        patch.setattr(blocks, "token_loss_sum", token_loss_sum)
        llama.loss(ids, torch.arange(8)[None], ids).backward()
    return alive[0]
