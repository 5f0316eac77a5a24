"""On real GPUs: two turns of generation over ranks, of models with states and with latents, in fp32."""

from functools import partial

import pytest

from benchmarks.tiny_families import tiny_model
from bmburst import Mesh
from bmburst.integrations.transformers import register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests.gpu.over_gpus import GPUS, run
from tests.integrations import recurrent_program as program

pytestmark = pytest.mark.gpu
# Those that all releases of transformers have whose caches have states.
TYPES = ({*program.ANSWERED} - {"recurrent_gemma"}) | {"qwen3_next", "longcat_flash", "afmoe"}
LIMIT = 2e-3  # over some layers and 30 tokens: kernels of fla multiply fp32 in TF32


@pytest.mark.parametrize("size", range(1, min(GPUS, 4) + 1))
def test_two_turns(size):
    run("torch.distributed", size, _two_turns)


def _two_turns():
    register()
    mesh = Mesh.over_process_group()
    for name in sorted(TYPES):
        model, whole = (tiny_model(name, kind).float().cuda() for kind in ("bmburst", "eager"))
        for length in (1, 23):
            cache = SplitCache(model.config, mesh)
            call = partial(generate, model, mesh=mesh, past_key_values=cache)
            ours, theirs = (program.turns(each, length, "cuda") for each in (call, whole.generate))
            assert ours["text"].tolist() == theirs["text"].tolist(), (name, length)
            off = float((ours["logits"] - theirs["logits"]).norm() / theirs["logits"].norm())
            assert off < LIMIT, (name, length, off)
