"""A compiled model has the losses of the model as it is, where what a call computes differs from call to call."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.integrations.neftune import activate_neftune

from bmburst import Documents
from bmburst.integrations.transformers import SplitSequences, register
from tests import tiny
from tests.distributed.threads import mesh_of
from tests.refusals import refused

IDS = torch.randint(61, (1, 22), generator=torch.Generator().manual_seed(1))


def _model() -> Any:
    register()
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    return tiny.transformers_model("qwen3_moe", attention="bmburst", **changes).train()


def _losses(model: Any) -> list[float]:
    """Return losses of batches of other documents, with as many tokens a rank: a cut in zigzag is even."""
    split, found = SplitSequences(mesh_of()), []
    for length, cut in ((22, 9), (21, 14), (22, 14), (21, 9)):
        torch.manual_seed(length)
        ids = IDS[:, :length]
        found.append(split.part(ids, labels=ids, documents=Documents((cut, length - cut))).loss(model).item())
    return found


@pytest.mark.long
def test_documents_noise_and_the_routers_loss_of_a_compiled_model() -> None:
    """Each is that of the call, and no call compiles again."""
    torch.compiler.reset()
    model, graphs = _model(), CompileCounter()
    model.compile(backend=graphs)
    activate_neftune(model, 40.0)
    first = _losses(model)
    compiled = graphs.frame_count
    with torch.compiler.set_stance("force_eager"):
        expected = _losses(model)
    assert first == pytest.approx(expected, rel=1e-6)
    assert _losses(model) == pytest.approx(expected, rel=1e-6) and graphs.frame_count == compiled < 20


@pytest.mark.long
def test_noise_that_a_graph_leaves_out_is_refused() -> None:
    """torch.compile does not notice that a model has got a hook."""
    torch.compiler.reset()
    model = _model()
    model.compile(backend="eager")
    _losses(model)
    activate_neftune(model, 40.0)
    with refused("NEFTune's noise was not added | torch.compile | fix: torch.compiler.reset()"):
        _losses(model)
