"""What every rank does with tiny models with latent attention, exchanging latents. Rank 0 leaves what it saw."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.tiny_families import tiny_model
from bmburst import Mesh
from bmburst.attention import latents
from bmburst.integrations.transformers import SplitSequences, register
from tests.attention.exchange_ways import move_heads
from tests.integrations.recurrent_program import part_of, step, wrapped


def run(output: Path, cases: Sequence[tuple[str, str]], size: int, wraps: Sequence[str]) -> None:
    """Types and batches on sequences over all ranks, and wrapped models of the first type."""
    register()
    mesh, found, times = Mesh.over_process_group(sequence=size), {}, []
    forward, backward = latents._LATENTS
    counted = latents.Executor(lambda *given: times.append(1) or forward(*given), backward)
    with pytest.MonkeyPatch.context() as patch:
        move_heads(patch, "latents")
        patch.setattr(latents, "_LATENTS", counted)
        for name, case in cases:
            model = tiny_model(name, "bmburst")
            part = part_of(SplitSequences(mesh, layout="zigzag" if case == "documents" else "contiguous"), case)
            times.clear()
            with torch.no_grad():
                logits = part.whole(part.logits(model))
            found[f"{name} {case}"] = {"logits": logits, "times": len(times)} | step(model, part)
        for kind in wraps:
            model = wrapped(kind, tiny_model(cases[0][0], "bmburst").train())
            times.clear()
            found[kind] = step(model, part_of(SplitSequences(mesh), "documents")) | {"times": len(times)}
    if dist.get_rank() == 0:
        torch.save(found, output)
