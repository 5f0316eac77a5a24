"""Each way of a part of a step that `benchmarks.operators` measures gives the same results."""

from dataclasses import replace

import pytest
import torch

from benchmarks import operators
from bmburst.blocks.presets import PRESETS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = replace(PRESETS["llama-tiny"], num_layers=1)


def test_all_ways_of_a_part_are_alike():
    torch.manual_seed(1)
    seen = []
    for part in operators.parts(MODEL, 2100, 1, DEVICE):
        results = {name: [t.detach().double().cpu() for t in way()] for name, way in part.ways.items()}
        (_, wanted), *others = results.items()
        for name, found in others:
            for ours, theirs in zip(found, wanted, strict=True):
                near = pytest.approx(0, abs=2**-7 * float(theirs.abs().max()))  # roundings to bf16
                assert float((ours - theirs).abs().max()) == near, (part.name, name)
        seen.append(part.name)
        assert part.times >= 1 and bool(part.flops) != bool(part.nbytes)
    assert len(seen) == len(set(seen)) == 7 + (DEVICE.type == "cuda")
