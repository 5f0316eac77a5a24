"""GRPO in docs/hugging_face.md: on 2 ranks the script trains as TRL on 2 processes; the text is what the code does."""

import re

import pytest
import torch
from safetensors.torch import load_file

from bmburst.integrations.grpo_arguments import ALLOWED
from tests.docs.blocks import text_of
from tests.docs.scripts import Page, run_script
from tests.docs.test_neighbours import original

PAGE = "hugging_face.md#grpo-and-rloo"
SCRIPT = "train_with_grpo.py"


def _numbers(printed: str) -> list[tuple[float, ...]]:
    lines = re.findall(r"^reward \d.*$", printed, re.M)
    return [tuple(float(number) for number in re.findall(r" ([\d.]+)", line)) for line in lines]


@pytest.mark.long
def test_the_script_trains_as_the_original(run_page) -> None:
    page: Page = run_page(PAGE)
    (page.folder / "original.py").write_text(original((page.folder / SCRIPT).read_text()))
    assert "bmburst" not in re.sub(r"#.*", "", (page.folder / "original.py").read_text())
    expected = _numbers(run_script(page.folder, 2, ["original.py", "original"], host=False))
    found = _numbers(page.printed)
    assert len(found) == len(expected) == 8 and expected[-1][0] > expected[0][0] + 0.1, expected
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    weights, of_original = (load_file(page.folder / at / "model.safetensors") for at in ("two", "original"))
    # AdamW divides by the gradient's size: weights with almost none differ by more than rounding.
    assert max(float((weights[key] - weight).abs().max()) for key, weight in of_original.items()) < 5e-3
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_the_page_names_the_losses_and_what_is_refused() -> None:
    text = text_of(PAGE)
    assert all(f"`{loss}`" in text for loss in ALLOWED["loss_type"][0])
    refused = {"top_entropy_quantile", "use_adaptive_entropy", "cast_lm_head_to_fp32", "torch_compile"}
    assert refused <= {*ALLOWED} and all(name in text for name in refused)
