"""Tests which causal LMs of transformers are exact on a split sequence: `bmburst bench families`.

Every model type of the installed transformers is created tiny (`benchmarks.tiny_families`), without dropout. One batch
is computed whole, with transformers' attention, and split over the ranks. Logits, loss and all gradients must agree to
4e-5, relative, in fp64. Models still compute norms and gates in fp32, which leaves distances of up to 1.2e-5 (zamba2).
A gradient whose norm is below a hundredth of the largest is
compared relative to that hundredth: that of a key bias, for example, is zero up to rounding.

A type is "exact" if the results agree, "refused" if bmburst refuses the model, and "not causal" or "not text" if it is
no model of text by itself. "different" (the results do not agree), "failed" (any other error) and "not made" (the tiny
model cannot be created or run) are bugs.
"""

import argparse
import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Row, RowBenchmark
from benchmarks.tiny_families import TOKENS, VOCABULARY, tiny_model
from bmburst.errors import UserError, first_line

TOLERANCE = 4e-5
KINDS = ("exact", "different", "failed", "refused", "not causal", "not text", "not made")
BUGS = frozenset({"different", "failed", "not made"})
OTHERS = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        ("not causal", "it drafts for another model, and takes that model's hidden states, keys and values"),
    ),
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), ("not text", "its tokens are codes of sound, of several codebooks at a time")
    ),
}
"""Types that are no model of text by themselves, with the result and the reason."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types (default: all)")


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown: the exact types in a line, the others with their reasons."""
    rows, ranks = record["rows"], record["machine"]["ranks"]
    version = rows[0]["transformers"] if rows else ""
    by_kind = {kind: [row for row in rows if row["result"] == kind] for kind in KINDS}
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in by_kind.items() if found or kind != "failed")
    lines = [f"transformers {version}, {ranks} ranks, {len(rows)} model types: {counts}.", "", "Exact:"]
    lines += [", ".join(row["type"] for row in by_kind["exact"]) + ".", ""]
    others = ([row[name] for name in ("type", "result", "reason")] for kind in KINDS[1:] for row in by_kind[kind])
    return "\n".join([*lines, *markdown_table(["type", "result", "reason"], others)])


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """Test every type on this rank; all ranks yield the same rows."""
    import torch
    import torch.distributed as dist
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from bmburst.integrations.transformers import SplitSequences, register
    from bmburst.mesh import Mesh

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    register()
    split = SplitSequences(Mesh.over_process_group())
    for name in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, _tried(name, split))
        result, reason = max(reasons, key=lambda each: (each[0] in BUGS, KINDS.index(each[0])))
        yield {"type": name, "result": result, "reason": reason, "transformers": transformers.__version__}
        gc.collect()


def _tried(name: str, split: Any) -> tuple[str, str]:
    """Return the result of a type, one of `KINDS`, and the reason or the largest distance."""
    import torch

    if name in OTHERS:
        return OTHERS[name]
    ids = torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with contextlib.redirect_stdout(None):
            model = tiny_model(name, "bmburst")
            part = split.part(ids)
            with torch.no_grad():
                our_logits = part.logits(model)
            ours = part.loss(model)
            ours.backward()
    except UserError as error:
        return "refused", _cell_text(error)
    except Exception as error:  # the code of 200 model types may raise anything
        failed = f"{type(error).__name__}: {_cell_text(error)}"
    else:
        failed = ""
    try:
        whole = tiny_model(name, "eager")
        logits = whole(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if not bool(logits.isfinite().all()):
            raise ValueError("its tiny model gives numbers that are not finite")
    except Exception as error:
        return "not made", _cell_text(error)
    if failed:  # not a refusal: a bug of bmburst
        return "failed", failed
    return _compared(whole, logits, loss, model, part.whole(our_logits), split.mean(ours.detach()))


def _compared(whole: Any, logits: Any, loss: Any, model: Any, our_logits: Any, our_loss: float) -> tuple[str, str]:
    """Compare logits, loss and gradients on split sequences with those on whole ones; return as `_tried`.

    Gradients are averaged over the ranks.
    """
    import torch
    import torch.distributed as dist

    distances = {"logits": _distance(our_logits, logits), "loss": abs(our_loss / loss.item() - 1)}
    theirs = dict(whole.named_parameters())
    # The gradient of a key bias is zero up to rounding, since softmax is invariant to it.
    least = 1e-2 * max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        dist.all_reduce(gradient)
        if wanted is not None:
            difference = gradient / dist.get_world_size() - wanted
            distances[name] = float(difference.norm()) / max(float(wanted.norm()), least)
    worst = max(distances, key=lambda name: distances[name])
    if distances[worst] < TOLERANCE:
        return "exact", f"{distances[worst]:.1e}"
    return "different", f"{worst}: {distances[worst]:.1e}"


def _distance(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _cell_text(error: BaseException) -> str:
    return first_line(error).replace("|", "/")[:160]


BENCHMARKS = (
    RowBenchmark(
        name="families", about=__doc__, configure=_configure, measure=lambda options: ({}, _rows(options)), table=table,
        line=lambda row: f"{row['type']}: {row['result']}, {row['reason']}", ranks=2,
        is_wrong=lambda row: row["result"] in BUGS,
    ),
)  # fmt: skip
