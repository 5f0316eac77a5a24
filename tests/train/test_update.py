"""A step in parts: gradients of several `backward` are added up, and `update` takes them once."""

import pytest
import torch

from bmburst.errors import UserError
from bmburst.recompute.policy import POLICIES
from bmburst.train.config import OptimizerConfig
from tests import lazy
from tests.distributed.programs import on_program
from tests.train import run_program as program


@on_program(2)
def test_a_step_in_parts(tmp_path):
    clip = OptimizerConfig(clip_norm=0.01)
    trainer = program.trainer(tmp_path, "run", recompute="auto", optimizer=clip)
    assert trainer.config.recompute in POLICIES  # what is said of this run is said of what was decided
    batches, alone = [trainer.next_batch() for _ in range(2)], []
    for batch in batches:
        trainer.backward(batch)
        alone.append([g.clone() for g in trainer.optimizer.gradients()])
        trainer.optimizer.zero_grad(set_to_none=False)
    before = weights(trainer)
    for batch in batches:
        facts = trainer.backward(batch)
        trainer.evaluate()
    together = [a + b for a, b in zip(*alone, strict=True)]
    torch.testing.assert_close(trainer.optimizer.gradients(), together, rtol=1e-5, atol=1e-7)
    norm = trainer.mesh.sum(sum(g.double().square().sum().item() for g in together)) ** 0.5
    assert facts.grad_norm == pytest.approx(norm, rel=1e-5)
    assert trainer.update(facts) > 0 and trainer.steps_done == 1
    held = weights(trainer)
    assert not torch.equal(held, before)
    with pytest.raises(UserError, match=r"step 1[\s\S]*call backward"):  # Adam would move the weights all the same
        trainer.update(facts)
    assert trainer.steps_done == 1 and torch.equal(weights(trainer), held)


def weights(trainer):
    return torch.cat([shard.local().detach().flatten() for shard in lazy.named_shards(trainer.model) if shard.count])
