"""The tables of table 1 in `docs/paper.md`: the formulas of `benchmarks.paper.overheads`, and measured transfers.

Imports no torch before a table of a slow link is made.
"""

from benchmarks.paper import overheads
from benchmarks.paper.overheads import LI
from benchmarks.paper.tables import PAPER, SLOW_LINK, Recorded, ms, said

MIB = 1 << 20


def communication() -> list[str]:
    """Return table 1's communication: the paper's formulas, ours, and MiB that a rank receives."""
    names = list(overheads.EXAMPLES)
    lines = [
        f"| method | the paper, numbers | forward, bytes | backward, bytes | {' | '.join(names)} |",
        "|---" * 7 + "|",
    ]
    for name, method in overheads.METHODS.items():
        moved = (f"{method.forward(s) / MIB:.0f} / {method.backward(s) / MIB:.0f}" for s in overheads.EXAMPLES.values())
        cells = (name, method.paper or "-", *method.formulas, *moved)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "The last three columns: MiB that a GPU receives in forward / backward, 64K tokens, bf16.", ""]


def memory() -> list[str]:
    """Return table 1's memory and I/O: the paper's formulas, what a rank keeps, and what forward writes and reads."""
    shape = overheads.EXAMPLES["MHA, 8 GPUs"]
    lines = [
        "| method | the paper, numbers | kept for backward | MiB | scores written in forward | MiB | at once | "
        "reads and writes in forward, order of | 10^9 |",
        "|---" * 9 + "|",
    ]
    for name, method in overheads.METHODS.items():
        kept, written, at_work = (f"{of(shape) / MIB:,.0f}" for of in (method.kept, method.scores, method.at_work))
        moved = f"{method.io(shape) / 1e9:.1f}"
        cells = (method.paper_kept or "-", method.kept_formula, kept, method.scores_formula, written, at_work)
        lines.append(f"| {' | '.join((name, *cells, method.io_formula, moved))} |")
    said = f"Numbers are for MHA with 64K tokens on 8 GPUs, bf16. M = {overheads.ON_CHIP:,}: 192 KiB of an A100's"
    return [*lines, "", f"{said} multiprocessor.", ""]


def burst_and_kv() -> list[str]:
    """Return by how much burst and kv differ in backward, by formula."""
    mha = overheads.EXAMPLES["MHA, 8 GPUs"]
    lines = [
        "| burst receives fewer bytes than | in | by |",
        "|---|---|---|",
        f"| kv, MHA, gradients in 16 bits, a hop | backward | {overheads.fewer_a_hop(mha):.1%} |",
    ]
    for name, shape in overheads.EXAMPLES.items():
        lines.append(f"| kv, {name}, gradients in fp32 as they are sent | backward | {overheads.fewer(shape):.1%} |")
    for other in ("kv", LI):
        lines.append(f"| {other}, MHA, 8 GPUs | forward and backward | {overheads.fewer_in_all(mha, other):.1%} |")
    published = overheads.fewer_as_published(mha.head_dim)
    lines.append(f"| {LI}, MHA, as the paper counts both | forward and backward | {published:.1%} |")
    return [*lines, ""]


def backward(records: Recorded) -> list[str]:
    """Return bytes and milliseconds of backward's transfers over NCCL, by what travels."""
    keys = {(h, m): f"backward/65536/{h}/{m}@2" for h in ("mha", "gqa") for m in ("kv", "burst")}
    if not records.has(PAPER, keys.values()):
        return [records.where(PAPER)]
    lines = ["| heads | what moves | MB received | ms, transfers alone | ms, backward |", "|---|---|---|---|---|"]
    for (heads, method), key in keys.items():
        row = records.row(PAPER, key)
        texts = [
            said(row, lambda r: f"{r['bytes'] / 1e6:.1f}"),
            said(row, lambda r: ms(r, "transfers")),
            said(row, lambda r: ms(r, "backward")),
        ]
        lines.append(f"| {heads} | {method} | {' | '.join(texts)} |")
    return [*lines, "", records.where(PAPER, keys.values())]


def slow_link(records: Recorded) -> list[str]:
    """Return the same over a slow link between processes."""
    found = records.record(SLOW_LINK)
    if found is None:
        return [records.where(SLOW_LINK)]
    from benchmarks.paper.slow_link import table

    return [table(found), "", records.where(SLOW_LINK)]
