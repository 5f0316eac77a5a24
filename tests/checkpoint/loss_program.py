"""The mean loss of a text by the model of a directory: loaded as a run loads it, on all ranks, and by transformers."""

from functools import partial

import torch

from bmburst.checkpoint import hugging_face
from bmburst.mesh import Mesh
from bmburst.train.resolve import read_hugging_face_config
from tests import lazy


def loss_of(model, ids):
    """Return transformers' mean loss of one text `[1, tokens]`, in nats per label."""
    return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()


def write_loss(folder, ids, output):
    """Load a directory, and write a checkpoint and beside it the loss of one text that the ranks share."""
    import bmburst

    mesh = Mesh.over_bmtrain()
    model = lazy.Llama(read_hugging_face_config(folder), attention=partial(lazy.BurstAttention, group=mesh.sequence))
    hugging_face.load(model, folder)
    tokens = ids.shape[1]
    shard = bmburst.SequenceShard.cut(tokens, layout="zigzag", size=mesh.shape.sequence, rank=mesh.sequence_rank)
    part = shard.batch(ids)
    loss = mesh.sum(model.loss(part.tokens, part.positions, part.labels, tokens).item()) / (tokens - 1)
    hugging_face.save(model, output)
    if mesh.rank == 0:
        torch.save(loss, output / "loss")
