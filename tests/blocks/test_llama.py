"""The model against Hugging Face transformers' LLaMA, on 1 to 4 ranks; its weights from and to their directories."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.blocks import program
from tests.distributed.programs import run_program
from tests.errors import relative_error, too_far

Reference = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of random weights for each configuration."""
    folder = tmp_path_factory.mktemp("hugging_face")
    for name, config in program.CONFIGS.items():
        tiny.save(folder / name, config, std=0.3)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Reference]:
    """Logits, loss and gradients by transformers."""
    tokens, labels = program.data()
    found = {}
    for name in program.CONFIGS:
        model = tiny.load(folder / name)
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        everything = torch.zeros(2, 1, program.TOKENS, program.TOKENS)  # added to the scores: nothing is hidden
        full = model(tokens, attention_mask=everything).logits
        if name == "mistral":
            positions = torch.cat([torch.arange(n) for n in program.DOCUMENTS]).expand(2, -1)
            packed = model(tokens, position_ids=positions, use_cache=False).logits
            found["documents"] = {"logits": packed.detach()}
        found[name] = {"full": full.detach(), "logits": logits.detach(), "loss": loss.item(), "gradients": gradients}
    return found


@pytest.fixture(
    scope="module", params=[1, 2, 3, pytest.param(4, marks=pytest.mark.long)], ids=lambda size: f"{size}-ranks"
)
def job(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    output = tmp_path_factory.mktemp("job")
    run_program(request.param, program.run, folder, output)
    return {"size": request.param, "output": output, **torch.load(output / "results.pt")}


def test_logits(job: Reference, reference: dict[str, Reference]) -> None:
    if job["size"] == 3:  # sequence parallel 1, 2 and 4; three ranks serve the storage tests
        return
    _require_logits(job, reference, program.LOGITS[job["size"]])
    assert relative_error(job["logits full"], reference["gqa"]["full"]) < 1e-5


def test_families(job: Reference, reference: dict[str, Reference]) -> None:
    if job["size"] == 3:
        return
    for name in program.FAMILIES:
        found, expected = job[f"gradients {name}"], reference[name]
        assert found.pop("loss") == pytest.approx(expected["loss"], rel=1e-5)
        assert too_far(found, expected["gradients"]) == {}, name
    assert relative_error(job["documents"], reference["documents"]["logits"]) < 1e-5


def test_settings_of_families_matter(reference: dict[str, Reference]) -> None:
    for first, second in combinations(("gqa", "mistral", "qwen2", "qwen3", "qwen3-window", "minicpm-untied"), 2):
        assert relative_error(reference[first]["logits"], reference[second]["logits"]) > 0.01
    assert relative_error(reference["documents"]["logits"], reference["mistral"]["logits"]) > 0.01


def test_rope_scalings_matter(reference: dict[str, Reference]) -> None:
    """Same weights, other logits: otherwise the comparison above would not see a scaling that does nothing."""
    names = ["gqa", "linear", "dynamic", "yarn", "llama3"]
    for first, second in combinations(names, 2):
        assert relative_error(reference[first]["logits"], reference[second]["logits"]) > 0.01


def test_loss_and_gradients(job: Reference, reference: dict[str, Reference]) -> None:
    if job["size"] == 3:
        return
    _require_gradients(job, reference, program.VARIED[job["size"]])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_products_that_others_leave_out(
    size: int, folder: Path, reference: dict[str, Reference], tmp_path: Path
) -> None:
    run_program(size, program.run_products, folder, tmp_path)
    found = torch.load(tmp_path / "results.pt")
    logits, varied = program.left_out(size)
    _require_logits(found, reference, logits)
    _require_gradients(found, reference, varied)


def _require_logits(found: Reference, reference: dict[str, Reference], cases: list[tuple[str, str]]) -> None:
    ours = {(name, layout): found[f"logits {name} {layout}"] for name, layout in cases}
    assert too_far(ours, {case: reference[case[0]]["logits"] for case in cases}) == {}


def _require_gradients(found: Reference, reference: dict[str, Reference], cases: list[tuple[str, int]]) -> None:
    for name, i in cases:
        expected, (policy, zero_level, _) = reference[name], program.VARIANTS[i]
        of_case = found[f"gradients {name} {policy} {zero_level}"]
        assert of_case.pop("loss") == pytest.approx(expected["loss"], rel=1e-5)
        assert too_far(of_case, expected["gradients"]) == {}, (name, policy, zero_level)


@pytest.fixture(scope="module")
def digests() -> list[dict[str, tuple[float, float]]]:
    """Of the fresh weights of every job so far."""
    return []


def test_fresh_weights_depend_on_the_seed_alone(job: Reference, digests: list[dict[str, tuple[float, float]]]) -> None:
    fresh: dict[str, Tensor] = job["fresh"]
    digest = {name: (full.double().sum().item(), full.flatten()[0].item()) for name, full in fresh.items()}
    digests.append(digest)
    assert digest == digests[0]
    norms = [full for name, full in fresh.items() if "norm" in name]
    matrices = {name: full for name, full in fresh.items() if "norm" not in name}
    assert all((full == 1).all() for full in norms)
    assert (
        len({value for name, value in digest.items() if name in matrices and "bfloat16" not in name})
        == len(matrices) // 2
    )
    for name, full in matrices.items():
        std = 0.02 / 2 if "o_proj" in name or "down_proj" in name else 0.02  # two layers: 1 / sqrt(2 * 2)
        # The standard deviation of n draws is itself off by 1 / sqrt(2 n), relative; five times that never happens.
        assert full.float().std().item() == pytest.approx(std, rel=5 / (2 * full.numel()) ** 0.5), name
        if "bfloat16" in name:
            assert torch.equal(full, matrices[name.replace("bfloat16", "float32")].bfloat16())


def test_fresh_matrices_of_minicpm_shrink_with_the_width_and_not_with_the_depth(job: Reference) -> None:
    """arXiv:2404.06395, table 7: init_std / sqrt(width / base), where LLaMA's two last ones shrink with the depth."""
    for name, full in job["fresh minicpm"].items():
        if "norm" not in name:
            std = 0.02 * (7 / 24) ** 0.5 if "layers" in name else 0.02
            assert full.std().item() == pytest.approx(std, rel=5 / (2 * full.numel()) ** 0.5), name


def test_fresh_biases_are_zero(job: Reference) -> None:
    assert job["biases"] == {f"model.layers.{i}.self_attn.{part}_proj.bias": 0 for i in range(2) for part in "qkv"}


def test_gather_and_scatter_are_inverses(job: Reference) -> None:
    assert job["moved"] == []


def test_weight_decay_leaves_out_exactly_the_norms(job: Reference) -> None:
    names, apart = job["undecayed"]
    norms = [f"model.layers.{i}.{norm}_layernorm.weight" for i in range(2) for norm in ("input", "post_attention")]
    assert names == [*norms, "model.norm.weight"]
    assert apart


def test_zero_3_holds_two_blocks_between_the_passes_and_none_after_them(job: Reference) -> None:
    """Of 4 blocks, with one storage for matrices and one for norms each."""
    assert job["gathered"] == (8, 4, 0)


def test_a_recomputation_leaves_out_the_last_product(job: Reference) -> None:
    """Of each of 2 blocks: q, k, v, o, gate, up, down, in one chunk and in 4; down is not computed again."""
    none, *recomputed = job["products"]
    head = none[0] - 2 * 7, none[1] - 2 * 2 * 7  # each product has two gradients
    assert recomputed == [(n * 2 * 7 + head[0], n * 2 * (2 * 7 + 6) + head[1]) for n in (1, 4)]


def test_every_norm_asks_for_its_kernel(job: Reference) -> None:
    """Of each of 2 blocks two, and two of the heads of Qwen3's; the last one."""
    assert job["norms"] == ["torch"] * (2 * 4 + 1) + ["auto"] * (2 * 2 + 1)


def test_kernels_are_compiled_ahead_on_few_tokens(job: Reference) -> None:
    """On as many as make a mask of the kind that training has: a window hides something of them."""
    wanted = [(1024, []), (1024, ["segments"]), (1400, ["window"])]
    assert job["compiled"] == [([1, n, 2, 8], [1, n, 1, 8], needs) for n, needs in wanted for _ in range(2)]


def test_bmtrain_saves_and_loads_it(job: Reference) -> None:
    assert job["bmtrain"]


def test_export_is_read_by_transformers(job: Reference, reference: dict[str, Reference]) -> None:
    tokens, _ = program.data()
    for name in program.EXPORTED:
        directory = job["output"] / name
        assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
        with torch.no_grad():
            logits = tiny.load(directory)(tokens).logits
        torch.testing.assert_close(logits, reference[name]["logits"], rtol=0, atol=0)


def test_bad_input_is_told_to_every_rank(job: Reference) -> None:
    told = [torch.load(job["output"] / f"problems-{rank}.pt") for rank in range(job["size"])]
    assert all(messages == told[0] for messages in told)
    starts = {
        "missing": "no directory ",
        "other": "num_kv_heads is 2 in this model but 4 in ",
        "unwritable": "cannot write to ",
        "token": "token id ",
        "misfit": "tokens (2, 37) and positions (2, 36) differ in shape",
        "recompute": "unknown recompute policy 'blocks'; did you mean 'block'?",
        "layers": "recompute policy 'block+first-2' names all of the model's 2 layers",
        "chunk": "loss_chunk 0\nfix: at least 1",
        "mlp": "mlp_chunk -1\nfix: at least 1",
        "zero": "zero_level 1\nfix: 2 or 3",
        "norm": "unknown kernel 'cpm-kernel'; did you mean 'cpm-kernels'?",
        "norm here": "norm kernel 'cpm-kernels' runs on NVIDIA GPUs only, and the tensors are on cpu",
        "balanced": "layout 'balanced' is made for the mask of a batch",
        "length": "rope_scaling of kind dynamic depends on the length",
    }
    assert told[0].keys() == starts.keys()
    for name, start in starts.items():
        assert told[0][name].startswith(start)
