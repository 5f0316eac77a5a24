"""`generate` with a split cache against the unsplit model's own generate, in fp32."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bmburst.attention import options
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import CheckedCommunicator
from bmburst.integrations.transformers_attention import Near, SequenceMask
from bmburst.integrations.transformers_cache import SplitLayer
from bmburst.schedule.cache_split import CacheSplit
from bmburst_ops.flash import KERNELS, Partial, Scoring, select_kernel
from bmburst_ops.flash.cpu import CpuKernel
from bmburst_ops.flash.inputs import unless_able
from bmburst_ops.pattern import Need
from tests.distributed.processes import run_processes
from tests.distributed.threads import run_ranks
from tests.integrations import transformers_generate_program as program
from tests.integrations.transformers_program import make_model
from tests.refusals import says


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What transformers' own attention and cache generate."""
    found = {}
    options: dict[str, Any] = {"max_new_tokens": program.NEW, "min_new_tokens": program.NEW, "do_sample": False}
    for name, (family, changes) in program.MODELS.items():
        model = make_model(family, "eager", torch.float32, **changes).eval()
        for length in program.LENGTHS:
            first = model.generate(program.prompt(length), **options)
            found[f"{name} {length}"] = first
            turn = torch.cat((first, program.prompt(17)), 1)
            found[f"{name} {length} turn"] = model.generate(turn, **options)
    return found


@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))])
def test_tokens_equal_transformers(ranks: int, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run_processes(ranks, program.run, tmp_path)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    assert {n: seen[0][n].tolist() for n in expected} == {n: each.tolist() for n, each in expected.items()}
    for other in seen[1:]:
        assert [
            n for n in seen[0] if isinstance(seen[0][n], torch.Tensor) and not torch.equal(other[n], seen[0][n])
        ] == []
    # Keys and values of 1000 tokens of two samples: each rank's own, and the room of a layer that has grown once.
    config = make_model("llama", "eager", torch.float32).config
    row = 2 * 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for rank, each in enumerate(seen):
        assert each["nbytes"] == row * (len(range(rank, 1000, ranks)) + 64)
    assert all(each["refused"] == seen[0]["refused"] for each in seen)
    for words, text in zip(program.REFUSED, seen[0]["refused"], strict=True):
        assert says(text, words), text
    for each in seen:
        says(each["other models"][0], "sdpa")
        says(each["other models"][1], "no head | AutoModelForCausalLM")
        if ranks > 1:
            says(each["differing"], "max_new_tokens 2 | max_new_tokens 3 | rank 1")


class WithoutWindows(CpuKernel):
    """A kernel as cuDNN's, which has no windows, where others have them."""

    name = "without windows"

    def refusal(self, q: torch.Tensor, k: torch.Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        del q, k
        return unless_able(needs)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, into: Partial | None = None
    ) -> Partial:
        assert not scoring.pattern.needs
        return super().forward(q, k, v, scoring, into)


def test_a_turn_shorter_than_the_window_takes_a_kernel_that_has_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn's own mask is causal; what it sees of the turns before is not."""
    able = (WithoutWindows(), *KERNELS)
    monkeypatch.setattr(options, "select_kernel", partial(select_kernel, kernels=able))
    before, turn, window = 9, 4, 6
    q, k, v = torch.randn(3, 1, 2, before + turn, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = torch.arange(turn)[:, None] + before - torch.arange(before + turn)
    visible = (distance >= 0) & (distance < window)
    wanted = torch.nn.functional.scaled_dot_product_attention(q[:, :, before:], k, v, attn_mask=visible)

    def body(comm: CheckedCommunicator) -> None:
        layer = SplitLayer(None, CacheSplit.choose("tokens", 1, 0, 2, 2))  # type: ignore[arg-type]  # for decoding
        layer.update(k[:, :, :before], v[:, :, :before])
        layer.prefilling = turn
        layer.update(k[:, :, before:], v[:, :, before:])
        mask = SequenceMask(comm=comm, options=AttentionOptions(layout="striped"), shape=(1, turn), length=turn)
        new = (t[:, :, before:].transpose(1, 2) for t in (q, k, v))
        out = mask.seen(Near(window=window)).attend(*new, None, layer=layer)
        torch.testing.assert_close(out.transpose(1, 2), wanted, rtol=1e-10, atol=1e-10)

    run_ranks(1, body)
