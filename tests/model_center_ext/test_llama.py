"""`model_center_ext.Llama` against ModelCenter's own Llama (model-center 1.0.2, unmodified), on 1 and 4 ranks.

Of 4 ranks 1, 2 and 4 share a sequence. ModelCenter is of the test environment (`make install`); it runs on the host
runtime as BMTrain does.
"""

from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.programs import run_program
from tests.errors import relative_error, too_far
from tests.model_center_ext import program

Results = dict[str, Any]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.long)], ids=lambda size: f"{size}-ranks")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    assert find_spec("model_center") is not None, "model-center 1.0.2 is not installed: make install"
    folder = tmp_path_factory.mktemp("job")
    run_program(request.param, program.run, folder)
    return {"size": request.param, "folder": folder, **torch.load(folder / "results.pt")}


def _sizes(job: Results) -> list[int]:
    return [size for size in (1, 2, 4) if size <= job["size"]]


def test_logits(job: Results) -> None:
    for name in program.CONFIGS:
        cases = product(_sizes(job), program.LAYOUTS if name == "plain" else ("zigzag",))
        ours = {(size, layout): job[f"logits {name} {size} {layout}"] for size, layout in cases}
        assert too_far(ours, dict.fromkeys(ours, job[f"logits {name}"])) == {}, name
    assert relative_error(job["logits tied"], job["logits plain"]) > 0.01


def test_gradients(job: Results) -> None:
    for name in program.CONFIGS:
        theirs = job[f"gradients {name}"]
        for size in _sizes(job):
            ours = job[f"gradients {name} {size}"]
            # All samples on each data rank where there are more than two: as many times the loss, over as many tokens.
            assert too_far(ours, theirs) == {}, (name, size)


def test_ranks_that_share_matrices(tmp_path: Path) -> None:
    run_program(4, program.run_tensor, tmp_path, tensor=2)
    found = torch.load(tmp_path / "results.pt")
    assert relative_error(*found["logits"]) < 1e-5
    for ours, theirs in (found["gradients"], found["saved"]):
        theirs.pop("position_bias.inv_freq", None)
        assert too_far(ours, theirs) == {}
    assert all(torch.equal(ours, found["saved"][1][key]) for key, ours in found["saved"][0].items())


def test_fewer_kv_heads(job: Results) -> None:
    assert relative_error(job["logits gqa ours"], job["logits gqa"]) < 1e-5
    assert too_far(job["gradients gqa ours"], job["gradients gqa"]) == {}


def test_factors_of_minicpm(job: Results) -> None:
    assert relative_error(job["logits factors ours"], job["logits factors"]) < 1e-5
    assert relative_error(job["logits factors"], job["logits plain"]) > 0.01


def test_bfloat16(job: Results) -> None:
    assert job["bfloat16"].dtype == torch.bfloat16
    # Two blocks of about ten roundings each to 8 bits.
    assert 1e-4 < relative_error(job["bfloat16"].float(), job["logits plain"]) < 0.05


def test_samples_of_their_own_lengths(job: Results) -> None:
    ours, theirs = job["lengths"]
    assert relative_error(ours[0], theirs[0]) < 1e-5
    assert relative_error(ours[1, :20], theirs[1, :20]) < 1e-5


def test_checkpoints_go_both_ways(job: Results) -> None:
    assert torch.equal(job["returned"], job["logits plain"])
    assert torch.equal(job["converted"], job["logits plain"])
    assert job["loaded"] == ([], True)


def test_fresh_weights_are_those_of_the_configuration(job: Results) -> None:
    expected = {"layernorm": 3.0, "input_embedding": 0.5, "self_attention": 0.25, "ffn": 0.125, "output_projection": 1}
    for name, found in job["fresh"].items():
        wanted = next(value for part, value in expected.items() if part in name)
        assert found == pytest.approx(wanted, rel=0.15), name


def test_other_decoders_are_no_matter_of_configuration(job: Results) -> None:
    found = job["others"]
    assert found.keys() == {"GPT2", "OPT", "GPTj"}
    assert [found[name][0] for name in ("GPT2", "OPT")] == [["position_embedding.weight"]] * 2
    lacks = {name: refused.splitlines()[0].rpartition(" ")[2] for name, (_, refused) in found.items()}
    assert lacks == {"GPT2": "position_size", "OPT": "pad_token_id", "GPTj": "pos_rotary_dim"}


def test_bad_input_is_told_to_every_rank(job: Results) -> None:
    told = [torch.load(job["folder"] / f"problems-{rank}.pt") for rank in range(job["size"])]
    assert all(messages == told[0] for messages in told)
    starts = {
        "directory": f"{job['folder']}/nowhere: no such directory of weights\nfix: pass the directory",
        "shape": "encoder.layers.0.ffn.ffn.w_in.w_0.weight has shape (48, 24) in this model, but (40, 24) in ",
        "tied": "output_projection.weight has shape None in this model, but (61, 24) in ",
        "part": "input_ids [1, 8] are not a part of 50 tokens",
        "cache": "use_cache is not supported\nfix: generate with ",
        "mask as length": "length must be a number, or a tensor [1] for input_ids [1, 8], got ",
        "lengths": "length must be a number, or a tensor [1] for input_ids [1, 8], got ",
        "far": "length must be a number, or a tensor [1] for input_ids [1, 8], got int64[1]: [9]\nallowed: int64, 0 to",
        "floats": "length must be a number, or a tensor [1] for input_ids [1, 8], got float32[1]: [8.0]\nallowed: ",
        "no number": "length must be a whole number of at least 1, got 8.0",
        "no causal mask": "length is [5] and mask full, under which tokens see the padding",
        "window": "length is [5] and mask ",
        "mask": "attention_mask is not supported",
        "ids": "input_ids are missing",
        "list": "input_ids must be a torch tensor, got list",
        "float ids": "input_ids must be int32 or int64 [batch, local_tokens], got float32[1, 8]",
        "empty": "input_ids must be int32 or int64 [batch, local_tokens], got int64[0, 8]",
        "labels": "labels must be int32 or int64 [1, 8], as of the tokens, got int64[1, 3]",
        "norm_bias": "norm_bias True of a ModelCenter model is not supported",
        "recompute": "unknown recompute policy 'blocks'",
        "layers": "recompute policy 'block+first-2' names all of the model's 2 layers",
        "norm": "norm kernel 'cpm-kernels' runs on NVIDIA GPUs only, and the tensors are on cpu",
        "name": "unknown configuration 'llama-2-7'; did you mean 'llama-2-7b'?",
    }
    assert told[0].keys() == starts.keys()
    for name, start in starts.items():
        assert told[0][name].startswith(start), told[0][name]
