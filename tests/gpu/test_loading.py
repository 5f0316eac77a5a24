"""On a GPU the next batch is there before the step ends, and holds what a CPU reads."""

import pytest
import torch

from bmburst.sequence import SequenceShard
from bmburst.train.loading import Loader
from tests.train.given import Given, local

pytestmark = pytest.mark.gpu


def test_the_next_batch_is_copied_while_a_step_runs():
    length, device = 100_001, torch.device("cuda", torch.cuda.device_count() - 1)
    cut = SequenceShard.cut(length, layout="zigzag", size=2, rank=1)
    steps = [Given(ids, ids + 1) for ids in torch.arange(5 * length).view(5, 1, length)]
    with torch.cuda.device(device):
        loader = Loader(cut, device)
        found = []
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            batch = loader.load(step, following)
            torch.cuda._sleep(2_000_000_000)  # the step: about a second on its stream
            found.append(batch.ids + 0)
            if following is not None and len(found) > 2:  # allocating pinned memory waits for the device
                _, copied = loader._prefetch._coming[1].result()
                copied.synchronize()
                assert not torch.cuda.current_stream().query(), "the copy waited for the step"
            del batch  # its memory may be taken by the next
        assert all(ids.device == device for ids in found)
        for ids, step in zip(found, steps, strict=True):
            assert torch.equal(ids.cpu(), local(cut, *step).ids)
