"""What the model is given of packed documents. Rotary positions are relative, so that its losses alone could not tell
whether they begin again at each document.
"""

import torch

from bmburst.schedule.documents import Documents
from bmburst.sequence import SequenceShard
from bmburst.train.loading import token_losses
from tests.train.given import local


class Recorder:
    """Stands in for the model."""

    def loss(self, *given):
        self.given = given
        return torch.zeros(())


def given(layout, inputs, documents=None):
    model = Recorder()
    cut = SequenceShard.cut(inputs.shape[1], layout=layout, size=2, rank=1, mask="causal")
    token_losses(model, local(cut, inputs, inputs + 1, documents))
    return cut, model.given


def test_a_stream_is_one_text():
    cut, (tokens, positions, labels, length, *mask) = given("zigzag", torch.arange(14).reshape(2, 7))
    assert positions.tolist() == [cut.positions().tolist()] * 2
    assert (length, mask) == (7, [])
    assert (labels - tokens)[:, : cut.real_tokens].eq(1).all()


def test_documents_of_each_sequence():
    documents = ((3, 5), (8,))
    _, (_, positions, labels, length, masks) = given("contiguous", torch.arange(16).reshape(2, 8), documents)
    assert positions.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert labels.tolist() == [[5, 6, 7, 8], [13, 14, 15, 16]]
    assert (length, masks) == (None, (Documents((3, 5)), Documents((8,))))


def test_one_sequence_in_the_layout_of_its_documents():
    inputs, documents = torch.arange(64)[None], ((40, 10),)
    _, (tokens, positions, labels, _, mask) = given("balanced", inputs, documents)
    assert mask == Documents((40, 10))
    cut = SequenceShard.cut(64, layout="balanced", size=2, rank=1, mask="causal").under(mask)
    at = cut.positions()
    assert torch.equal(tokens[0], at)
    real = at < 50  # the rest is padding
    assert torch.equal(positions[0][real], torch.where(at < 40, at, at - 40)[real])
    assert torch.equal(labels[0], torch.where(real, at + 1, -100))
