"""Compares norm, activation and rotary embedding with a copy, on one GPU: `python -m benchmarks.elementwise`.

GB/s are the bytes that an operator must read and write (each tensor once) divided by the median time by CUDA events.
Caches are flushed between calls by writing 512 MiB. `copy` is `Tensor.copy_` of as many bytes: the speed of memory.
`plain` is the same operator in plain torch, on few enough tokens that its copies fit in memory (`--plain-tokens`).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.machine import require_gpu, write_record
from benchmarks.engine.timing import median_seconds
from bmburst.blocks.presets import PRESETS
from bmburst_ops import fused, rms_norm, rotary, swiglu

FLUSH = 1 << 29  # bytes, ten times the L2 of an H200


class Row(NamedTuple):
    """One operator: the call, and the bytes that it must move."""

    name: str
    call: Callable[[], object]
    nbytes: int


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=PRESETS, help="its widths (default: llama-3-8b)")
    parser.add_argument("--tokens", type=int, default=131072, help="of one rank (default: 131072)")
    parser.add_argument("--plain-tokens", type=int, default=16384, help="for plain torch; 0: not (default: 16384)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20, help="calls that are measured (default: 20)")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    require_gpu("benchmarks.elementwise")
    found = {"ours": _measure(options, options.tokens)}
    if options.plain_tokens:
        for module in (rms_norm, rotary, swiglu):
            module.triton_twin = lambda *_: None  # type: ignore[attr-defined]
        found["plain"] = _measure(options, options.plain_tokens)
    _show(found)
    write_record(options.output, "benchmarks.elementwise", options=vars(options) | {"output": None}, results=found)
    return 0


def _measure(options: argparse.Namespace, tokens: int) -> dict[str, dict[str, float]]:
    dtype = getattr(torch, options.dtype)
    scratch = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    found = {}
    for row in _rows(PRESETS[options.model], tokens, dtype):
        ((seconds, _),) = median_seconds([row.call], scratch, repeats=options.repeats, warm_up=3)
        source, target = (torch.empty(row.nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
        ((copied, _),) = median_seconds([partial(target.copy_, source)], scratch, repeats=options.repeats, warm_up=3)
        found[row.name] = {
            "milliseconds": 1e3 * seconds,
            "gigabytes_per_second": row.nbytes / seconds / 1e9,
            "copy_gigabytes_per_second": row.nbytes / copied / 1e9,
        }
    return found


def _rows(model: Any, tokens: int, dtype: torch.dtype) -> Iterator[Row]:
    """Yield each operator on its own tensors, which are freed before those of the next one are made."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    x, weight = random(1, tokens, model.hidden_size).requires_grad_(), random(model.hidden_size).requires_grad_()
    yield from _both("norm", lambda x, w: rms_norm.rms_norm(x, w, 1e-5), (x, weight), x.nbytes, 2, 3)
    gate, up = (random(1, tokens, model.intermediate_size).requires_grad_() for _ in range(2))
    yield from _both("swiglu", swiglu.swiglu, (gate, up), gate.nbytes, 3, 5)
    overwriting = lambda gate, up: swiglu.swiglu(gate, up, overwrite_grad=True)  # noqa: E731
    yield from list(_both("swiglu, overwriting", overwriting, (gate, up), gate.nbytes, 3, 5))[1:]
    del gate, up
    angle = torch.rand(1, tokens, model.head_dim // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    turn = lambda x: rotary.apply_rotary(x, cos, sin)  # noqa: E731
    query, heads = model.num_heads, model.num_heads + model.num_kv_heads
    projected = random(1, tokens, heads + model.num_kv_heads, model.head_dim)
    for name, part in (
        ("rotary, queries", random(1, tokens, query, model.head_dim)),
        ("rotary, keys", random(1, tokens, model.num_kv_heads, model.head_dim)),
        ("rotary, both out of one projection", projected[:, :, :heads]),
    ):
        tables = cos.nbytes + sin.nbytes
        yield from _both(name, turn, (part.requires_grad_(),), part.numel() * part.itemsize, 2, 2, extra=tables)


def _both(
    name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], nbytes: int, forward: int, backward: int,
    *, extra: int = 0,
) -> Iterator[Row]:  # fmt: skip
    """Yield forward and backward; the numbers are tensors of `nbytes` bytes that they move, besides `extra` bytes."""
    yield Row(f"{name}, forward", lambda: function(*(x.detach() for x in inputs)), forward * nbytes + extra)
    result = function(*inputs)
    grad = torch.randn_like(result)
    yield Row(
        f"{name}, backward",
        lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True),
        backward * nbytes + extra,
    )


def _show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    kernels = "Triton" if fused.triton_twin("triton_elementwise", torch.empty(1, device="cuda")) else "plain torch"
    print(f"ours: {kernels}")
    print(f"| {'operator':44} | {'ms':>8} | {'GB/s':>6} | {'copy':>6} | share |")
    print("|---|---|---|---|---|")
    for who, rows in found.items():
        for name, row in rows.items():
            speed, copy = row["gigabytes_per_second"], row["copy_gigabytes_per_second"]
            label = f"{who}: {name}"
            print(f"| {label:44} | {row['milliseconds']:8.3f} | {speed:6.0f} | {copy:6.0f} | {speed / copy:5.2f} |")


if __name__ == "__main__":
    sys.exit(main())
