"""A ModelCenter script with only its import changed: what it trains on several ranks, and what it is told of a mesh."""

from pathlib import Path
from typing import Any

import torch

import bmburst
from tests.distributed.programs import on_program, run_program
from tests.refusals import refused

IMPORT = "from model_center.model import Llama, LlamaConfig"
SCRIPT = f"""
import bmtrain as bmt
import torch
{IMPORT}

config = LlamaConfig(
    vocab_size=61, dim_model=24, num_heads=4, dim_head=8, dim_ff=40, num_layers=2, norm_eps=1e-3, half=False,
    att_init_std=0.3, ffn_init_std=0.3, emb_init_std=1.0, proj_init_std=0.3,
)
model = Llama(config)
bmt.init_parameters(model)
if weights.exists():
    bmt.load(model, str(weights), strict=False)
else:
    bmt.save(model, str(weights))
manager = bmt.optim.OptimManager(loss_scale=None)
manager.add_optimizer(bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2))
losses = []
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + bmt.rank())  # every rank reads batches of its own
    tokens, labels = torch.randint(61, (2, 2, 12), generator=generator)
    length = torch.tensor([12, 7 + bmt.rank()])
    labels[torch.arange(12) >= length[:, None]] = -100
    logits = model(tokens, length=length).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    manager.backward(loss)
    manager.step()
    manager.zero_grad()
    losses.append((loss.item(), bmt.sum_loss(loss).item()))
"""


def test_a_script_with_only_the_import_changed_trains_as_the_original(tmp_path: Path) -> None:
    run_program(2, _train, tmp_path, fresh=True)
    for rank in range(2):
        theirs, ours = torch.load(tmp_path / f"losses-{rank}.pt")
        assert len(theirs) == 3
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


def _train(folder: Path) -> None:
    import bmtrain as bmt

    found = []
    for text in (SCRIPT, SCRIPT.replace(IMPORT, "from model_center_ext import Llama, LlamaConfig")):
        names: dict[str, Any] = {"weights": folder / "weights.pt"}
        exec(text, names)
        bmt.synchronize()
        found.append(names["losses"])
    torch.save(found, folder / f"losses-{bmt.rank()}.pt")


@on_program(2, fresh=True)
def test_with_a_mesh_every_rank_is_told_of_what_is_no_part_of_one_batch() -> None:
    import bmtrain as bmt

    from model_center_ext import Llama, LlamaConfig

    small = {"vocab_size": 61, "dim_model": 24, "num_heads": 4, "dim_head": 8, "dim_ff": 40, "num_layers": 1}
    mesh = bmburst.Mesh.over_bmtrain()
    with mesh.current():
        models = [Llama(LlamaConfig(**small, half=False)), Llama(LlamaConfig(**small, half=False), mesh)]
    whole = torch.arange(24).view(2, 12)
    part = bmburst.SequenceShard.cut(12, layout="zigzag", group=mesh.sequence).batch(whole)
    own = torch.tensor([12, 7])
    for model in models:
        bmt.init_parameters(model)
        for call in (
            lambda m=model: m(whole),
            lambda m=model: m(whole, own),
            lambda m=model: m(whole, own - bmt.rank()),
            lambda m=model: m(part.tokens, length=12 + bmt.rank()),
            lambda m=model: m.loss(part.tokens, part.positions, part.labels, 12 - bmt.rank()),
            lambda m=model: m(part.tokens[: 2 - bmt.rank()], length=12),
        ):
            for compared in (True, False):  # on CPUs always, on GPUs the first time
                mesh.sequence.always, mesh.sequence.active = compared, compared
                mesh.sequence._state.compared.clear()
                with refused("fix: "):
                    call()
                mesh.sequence.always = mesh.sequence.active = True
        logits = [model(part.tokens, 12).logits, model(part.tokens, positions=part.positions).logits]
        assert torch.equal(*logits)
    alone = Llama(LlamaConfig(**small, half=False))
    bmt.init_parameters(alone)
    assert alone(whole, own).logits.shape == (2, 12, 61)
