"""`model_center_ext.Llama` in bfloat16 with flash kernels on GPUs: a split sequence gives what a whole one does.

ModelCenter itself is compared with on CPUs (`tests/model_center_ext`); here it need not be installed.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bmburst
from tests import lazy
from tests.distributed.programs import run_program

pytestmark = pytest.mark.gpu
TOKENS = 1001


def test_split_and_whole_sequences_agree(tmp_path: Path) -> None:
    size = min(torch.cuda.device_count(), 4)
    run_program(size, compare, tmp_path, on_gpus=True)
    found = torch.load(tmp_path / "found.pt")
    assert set(found) == {"whole fp32", "whole", "split", "saved"}
    exact = found["whole fp32"]

    def error(name: str) -> float:
        return float((found[name].float() - exact).norm() / exact.norm())

    # bfloat16 keeps 8 bits; a split sequence may be no worse than one GPU, but for luck.
    assert 1e-4 < error("whole") < 0.05
    assert error("split") < 1.35 * error("whole")
    assert torch.equal(found["saved"], found["split"])


def compare(folder: Path) -> None:
    """Run on every rank: the logits of the same weights in fp32 and bfloat16, whole and split, and saved and loaded."""
    from model_center_ext import Llama, LlamaConfig

    config = LlamaConfig.named("llama-tiny", dim_model=256, dim_head=64, vocab_size=512, att_init_std=0.1)
    first = Llama(config)
    lazy.bmt.init_parameters(first)
    _save(first, config, folder / "first")
    alone, together = (bmburst.Mesh.over_bmtrain(sequence=n) for n in (1, lazy.bmt.world_size()))
    model = Llama.from_pretrained(folder / "first", mesh=together, dtype="bfloat16")
    found = {
        "whole fp32": _logits(Llama.from_pretrained(folder / "first", mesh=alone, dtype="float32"), alone),
        "whole": _logits(Llama.from_pretrained(folder / "first", mesh=alone, dtype="bfloat16"), alone),
        "split": _logits(model, together),
    }
    _save(model, model.model_center_config, folder / "second")
    found["saved"] = _logits(Llama.from_pretrained(folder / "second", mesh=together), together)
    if lazy.bmt.rank() == 0:
        torch.save({name: logits.cpu() for name, logits in found.items()}, folder / "found.pt")


def _save(model: torch.nn.Module, config: object, folder: Path) -> None:
    from model_center_ext import LlamaConfig

    assert isinstance(config, LlamaConfig)
    if lazy.bmt.rank() == 0:
        folder.mkdir()
        config.to_json_file(folder / "config.json")
    lazy.bmt.synchronize()
    lazy.bmt.save(model, str(folder / "pytorch_model.pt"))


def _logits(model: torch.nn.Module, mesh: bmburst.Mesh) -> Tensor:
    ids = torch.arange(TOKENS)[None].cuda() * 7919 % 512
    with mesh.current(), torch.no_grad():
        return bmburst.unshard(model(bmburst.shard(ids), TOKENS).logits, length=TOKENS)
