"""The tables of `docs/paper.md`, each from recorded JSON or from the formulas; see `benchmarks.records`.

A file or cell that is missing in the records is marked in the table; it is not an error. Imports no torch.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.inference.kind import paper as first_token_facts
from bmburst.amounts import short

RESULTS = Path(__file__).parents[1] / "results"
PAPER, TRAIN, FIRST = "paper_2xh200_202611", "train_paper_2xh200_202611", "inference_paper_2xh200_202611"
PAPER_H100, TRAIN_H100 = "paper_2xh100_202611", "train_paper_2xh100_202611"
INFERENCE, ATTENTION = "inference_2xh200_202611", "attention_2xh200_202611"
PERPLEXITY, SLOW_LINK = "perplexity_202611", "slow_link_202611"
SPARSE, SPARSE_RANKS = "block_sparse_h200_202611", "block_sparse_2xh200_202611"
CROSS = ("cross_2xh200_202611", "cross_2xh100_202611", "cross_striped_2xh100_202611")
"""Records of cross-attention. The paper leaves it and sparse attention to future work."""
MISSING = "not recorded yet"
Row = dict[str, Any]
KIB = 1024
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8"))
TRAINED = ("ours", "ulysses", "zigzag-ring-nccl", "tensor-v1", "tensor-v3", "ring-li")
LENGTHS = tuple(KIB * n for n in (1, 4, 16, 32, 64, 128))


def gpu_of(record: str) -> str:
    """Return the GPU in a record's name: "H200" for "paper_2xh200_202611"; "" for a record of CPUs."""
    found = re.search(r"_(?:\d+x)?(h\d+)(?:_|$)", record)
    return found[1].upper() if found else ""


class Recorded:
    """The records of a folder.

    Args:
        folder: Folder of the JSON files.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def record(self, name: str) -> Any:
        """Return the content of a record's JSON file, or None if it does not exist."""
        if name not in self._read:
            path = self._folder / f"{name}.json"
            self._read[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return self._read[name]

    def row(self, name: str, key: str) -> Row | None:
        """Return a cell's row, or None if it is not recorded."""
        found = self.record(name)
        row: Row | None = None if found is None else found["rows"].get(key)
        return row

    def measured(self, name: str, key: str) -> Row | None:
        """Return a cell's row if its status is "ok", or None."""
        row = self.row(name, key)
        return row if row is not None and row["status"] == "ok" else None

    def has(self, name: str, keys: Iterable[str]) -> bool:
        """Return whether any of the cells is recorded."""
        return any(self.row(name, key) is not None for key in keys)

    def where(self, name: str, keys: Iterable[str] = ()) -> str:
        """Return a line with a link to the record, and the machine, date and commit of the cells' runs.

        Without keys, the runs of all cells are listed.
        """
        found = self.record(name)
        if found is None:
            return f"{MISSING.capitalize()}."
        runs = [found["machine"]] if "machine" in found else found["runs"]
        used = {row["run"] for key in keys if (row := self.row(name, key)) is not None}
        used = used or ({row["run"] for row in found["rows"].values()} if "machine" not in found else {0})
        machines = dict.fromkeys(_machine(runs[number]) for number in sorted(used))
        return f"Record: [{name}](../benchmarks/results/{name}.md); {'; '.join(machines)}."


def _machine(run: Row) -> str:
    whole = run.get("commit") or ""
    commit = whole[:7] + "+" * whole.endswith("+") if whole else "commit unknown"
    return f"{run['ranks']} x {run['device']}, {run['date'][:10]}, {commit}"


def cell_text(row: Row | None, show: Callable[[Row], str]) -> str:
    """Return a table's text for a cell: its number, the reason for its failure, or a dash if it is not recorded."""
    if row is None:
        return "-"
    if row["status"] == "ok":
        return show(row)
    reason: str = row["reason"]
    asked = re.search(r"out of memory(?: for ([\d.]+ \w+) more)?", reason)
    if asked:
        return "out of memory" + (f", {asked[1]} more" if asked[1] else "")
    fit = re.search(r"would not fit: about (\d+ GiB)", reason)
    least = re.search(r"takes (\d+ s) at least", reason)
    return f"would not fit: {fit[1]}" if fit else f"not run: {least[1] if least else reason}"


def way_of(row: Row) -> str:
    """Return "; ours is ..." with the attention strategy of a recorded step of ours; "" if it is not recorded.

    The default strategy is not the paper's ring, so verdicts name it.
    """
    chosen = row.get("strategy")
    if not chosen:
        return ""
    ranks = row["cell"]["ranks"]
    outer = "" if chosen["heads"] == ranks else f" with {chosen['outer']}"
    moved = "peer copies" if row["transport"] == "peer" else row["transport"]
    return f"; ours is `heads`{outer} by {moved}, not `burst`"


def grid(head: str, columns: Sequence[int], lines: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return a Markdown table over lengths or batch sizes. Lines without any entry are omitted."""
    made = [f"| {head} | {' | '.join(short(n) for n in columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, texts in lines:
        cells = list(texts)
        if any(text != "-" for text in cells):
            made.append(f"| {name} | {' | '.join(cells)} |")
    return [*made, ""]


def merge(records: Recorded) -> list[str]:
    """Return the ablation of the global optimization."""
    return _ablation(records, "merge", ("online", "at-the-end", "no-overlap"), (32 * KIB, 128 * KIB))


def tile(records: Recorded) -> list[str]:
    """Return the ablation of the local optimization."""
    return _ablation(records, "tile", ("flash", "whole-tile"), tuple(KIB * n for n in (4, 8, 16, 32, 64)))


def _ablation(records: Recorded, suite: str, methods: Sequence[str], tokens: Sequence[int]) -> list[str]:
    def line(method: str, show: Callable[[Row], str]) -> tuple[str, Iterable[str]]:
        return method, (cell_text(records.row(PAPER, f"{suite}/{n}/mha/{method}@2"), show) for n in tokens)

    keys = [f"{suite}/{n}/mha/{method}@2" for n in tokens for method in methods]
    if not records.has(PAPER, keys):
        return [f"{MISSING.capitalize()}."]
    times = grid("ms, forward / backward", tokens, (line(m, _both_ms) for m in methods))
    peaks = grid("peak GiB, forward / backward", tokens, (line(m, _peaks) for m in methods))
    return [*times, *peaks, records.where(PAPER, keys)]


def ms(row: Row, name: str) -> str:
    """Return the milliseconds of one of a row's calls."""
    return f"{row['milliseconds'][name]['median']:.2f}"


def _both_ms(row: Row) -> str:
    return f"{ms(row, 'forward')} / {ms(row, 'backward')}"


def _peaks(row: Row) -> str:
    return " / ".join("?" if peak is None else f"{peak:.1f}" for peak in row["peak_gib"].values())


def first_token(records: Recorded, model: str) -> list[str]:
    """Return table 2 or 3: seconds to the first token, of the paper on 8 A100 and ours on 2 H200."""
    facts = first_token_facts()
    tokens, lines = facts["tokens"], []
    for name, seconds in facts["models"][model].items():
        lines.append((f"8 A100: {name}", ["out of memory" if s is None else f"{s:.2f}" for s in seconds]))
    ways = {
        "heads": "heads (default)",
        "tokens": "ring",
        "no-lao": "no LAO",
        "tensor-v1": "TP v1",
        "tensor-v3": "TP v3",
        "ring-li": "Li et al.",
    }
    cells: list[str] = []
    for mask in ("causal", "full"):
        for method, title in ways.items():
            keys = [f"prompt/{model}/{n}/{mask}/{method}@2" for n in tokens]
            rows = [records.row(FIRST, key) or records.row(INFERENCE, key) for key in keys]
            texts = [cell_text(row, lambda r: f"{r['first_token_seconds']:.3f}") for row in rows]
            lines.append((f"2 H200, {'causal' if mask == 'causal' else 'no mask'}: {title}", texts))
            cells += keys
    further = ["", records.where(FIRST, cells)] if records.has(FIRST, cells) else []
    return [*grid("seconds", tokens, lines), records.where(INFERENCE, cells), *further]


def perplexity(records: Recorded) -> list[str]:
    """Return table 4: the paper's perplexities, and ours by method."""
    facts = FACTS["perplexity"]
    lines = ["| the paper, C4 | perplexity |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items() if name != "hardware"]
    found = records.record(PERPLEXITY)
    if found is None:
        return [*lines, "", records.where(PERPLEXITY)]
    from benchmarks.paper.perplexity import table

    labels = max(row.get("tokens", 0) for row in found["rows"].values())
    text = f"{found['sequences']} held-out sequences of {found['tokens']} tokens of {found['data']}, {labels:,} labels."
    trained = f" The model: `{found['trained']}`." if found["trained"] else f" The model: {found['model']}."
    return [*lines, "", table(found), "", text + trained, "", records.where(PERPLEXITY)]


def step_key(model: str, tokens: int, method: str, zero: int = 3) -> str:
    """Return the key of a step on two GPUs."""
    return f"step/{model}/{tokens}/{method}@2{'' if zero == 3 else f'-zero{zero}'}"


def training(
    records: Recorded, model: str, *, layers: int | None = None, record: str = TRAIN, zero: int = 3
) -> list[str]:
    """Return figures 2 and 3: seconds and memory of a step over lengths, by method.

    Args:
        records: The records.
        model: The preset.
        layers: Number of trained layers; None for the whole model.
        record: Name of the record.
        zero: Stage of ZeRO: 3, or 2.
    """
    name = model if layers is None else f"{model}-x{layers}"
    keys = {(n, method): step_key(name, n, method, zero) for n in LENGTHS for method in TRAINED}
    columns = [n for n in LENGTHS if records.has(record, (keys[n, method] for method in TRAINED))]
    if not columns:
        return [f"{MISSING.capitalize()}."]

    def lines(show: Callable[[Row], str]) -> Iterable[tuple[str, Iterable[str]]]:
        for method in TRAINED:
            yield method, (cell_text(records.row(record, keys[n, method]), show) for n in columns)

    trained = "all layers" if layers is None else f"{layers} layers"
    return [
        *grid(f"s a step, {trained}, ZeRO-{zero}, 2 {gpu_of(record)}", columns, lines(_seconds)),
        *grid("peak GiB a GPU", columns, lines(_peak)),
        records.where(record, keys.values()),
    ]


def scaling(records: Recorded) -> list[str]:
    """Return figure 4a: the first token of 13B at 64K on one GPU and on two, and steps of 7B."""
    lines = []
    if records.record(FIRST) is not None:
        key = "prompt/llama-2-13b/65536/causal"
        texts = {m: [_first(records, f"{key}/{m}@{n}") for n in (1, 2)] for m in ("heads", "tensor-v1", "tensor-v3")}
        lines += grid("13B, 64K, first token, s, on GPUs", (1, 2), texts.items())
        lines += [records.where(FIRST), ""]
    columns = tuple(KIB * n for n in (4, 32, 64))
    keys = {n: [f"step/llama-2-7b-x2/{tokens}/ours@{n}" for tokens in columns] for n in (1, 2)}
    if records.has(TRAIN, keys[1]):
        texts = {f"{n} GPU{'s' * (n > 1)}": [cell_text(records.row(TRAIN, k), _seconds) for k in keys[n]] for n in keys}
        lines += [*grid("7B, 2 layers, s a step, ours", columns, texts.items()), records.where(TRAIN, keys[1])]
    return lines or [f"{MISSING.capitalize()}."]


def _first(records: Recorded, key: str) -> str:
    return cell_text(records.row(FIRST, key), lambda r: f"{r['first_token_seconds']:.3f}")


def batches(records: Recorded) -> list[str]:
    """Return figure 4b: tokens a second and memory over the batch size, 4K tokens a sequence."""
    columns, methods = (1, 2, 4, 8), ("ours", "tensor-v3", "ring-li")
    names = {m: [f"step/llama-2-7b-x2/{_batch(n)}4096/{m}@2" for n in columns] for m in methods}
    keys = [key for own in names.values() for key in own]
    if not records.has(TRAIN, keys):
        return [f"{MISSING.capitalize()}."]

    def shown(row: Row) -> str:
        return f"{row['tokens_per_second']:,.0f} / {row['peak_memory_gib'] or 0:.1f}"

    lines = ((m, [cell_text(records.row(TRAIN, key), shown) for key in own]) for m, own in names.items())
    return [*grid("tokens/s a GPU / peak GiB, 7B, 2 layers, batch", columns, lines), records.where(TRAIN, keys)]


def _batch(count: int) -> str:
    return f"{count}x" if count > 1 else ""


def readme_lengths(records: Recorded) -> list[str]:
    """Return the README's table over lengths: forward, and forward with backward, in milliseconds."""
    facts = FACTS["readme"]
    lines = []
    for direction in ("forward", "forward_backward"):
        name = direction.replace("_", " + ")
        one_gpu = [_number(n) for n in facts[f"flash_{direction}"]]
        theirs = [f"{a:,} ({b})" for a, b in zip(facts[direction], one_gpu, strict=True)]
        lines.append((f"8 A100, {name}", theirs))
        for record in (PAPER, PAPER_H100):
            ours = [_two_and_one(records, record, f"sequence/{tokens}", direction) for tokens in facts["tokens"]]
            lines.append((f"2 {gpu_of(record)}, {name}", ours))
    where = " ".join(records.where(name) for name in (PAPER, PAPER_H100))
    return [*grid("ms, in brackets one GPU", facts["tokens"], lines), f"{facts['hardware']}. {where}"]


def readme_batches(records: Recorded) -> list[str]:
    """Return the README's table over batch sizes, at 64K tokens."""
    facts = FACTS["readme"]
    lines = []
    for direction in ("forward", "forward_backward"):
        name = direction.replace("_", " + ")
        lines.append((f"8 A100, {name}", [f"{n:,}" for n in facts[f"batch_{direction}"]]))
        texts = [_two_and_one(records, PAPER, f"batch/{n}x65536", direction) for n in facts["batches"]]
        lines.append((f"2 H200, {name}", texts))
    return [*grid("ms, 64K tokens, in brackets one GPU, batch", facts["batches"], lines), records.where(PAPER)]


def _two_and_one(records: Recorded, record: str, what: str, direction: str) -> str:
    """Return milliseconds on two GPUs and, in brackets, on one."""
    show = partial(_round, name=direction)
    two, one = (cell_text(records.row(record, f"{what}/mha/{method}"), show) for method in ("ours@2", "one-gpu@1"))
    return "-" if two == one == "-" else f"{two} ({one})"


def _round(row: Row, name: str) -> str:
    return f"{row['milliseconds'][name]['median']:,.0f}"


def _number(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "out of memory" if value is None else f"{value:,}"


def _seconds(row: Row) -> str:
    return f"{row['milliseconds']['median'] / 1e3:.3f}"


def _peak(row: Row) -> str:
    return "?" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.1f}"


_DIRECTIONS = ("forward", "forward and backward")


def sparse(records: Recorded) -> list[str]:
    """Return the times of block-sparse attention by density and kernel, relative to dense attention."""
    found = records.record(SPARSE)
    if found is None:
        return [records.where(SPARSE)]
    lines = ["| visible blocks | kernel | forward | forward and backward |", "|---|---|---|---|"]
    for row in found["rows"]:
        texts = [_share(row, direction) for direction in _DIRECTIONS]
        lines.append(f"| {row['density']:.1%} | {row['kernel']} | {' | '.join(texts)} |")
    caption = (
        f"ms, of dense attention's ms; in brackets the ratio of both over the share of visible blocks. "
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']}."
    )
    return [*lines, "", caption, "", records.where(SPARSE)]


def _share(row: Row, direction: str) -> str:
    times = row.get(direction)
    if not times:
        return "refused"
    return f"{times['milliseconds']:.1f} of {times['dense_milliseconds']:.1f} ({times['ratio']:.2f})"


def cross(records: Recorded) -> list[str]:
    """Return the speeds of cross-attention by mask, layouts and strategy, relative to one GPU's kernel on the whole."""
    found = {name: record for name in CROSS if (record := records.record(name)) is not None}
    if not found:
        return [records.where(CROSS[0])]
    strategies = list(dict.fromkeys(_way(row) for record in found.values() for row in record["rows"]))
    lines = [
        f"| 2 GPUs, mask, layouts of queries and keys | {' | '.join(strategies)} |",
        f"|---|{'---|' * len(strategies)}",
    ]
    for name, record in found.items():
        cases: dict[str, dict[str, str]] = {}
        for row in record["rows"]:
            case = f"{gpu_of(name)}, {row['mask']}, {row['layout']} and {row['key_layout']}"
            cases.setdefault(case, {})[_way(row)] = _speed(row)
        for case, texts in cases.items():
            lines.append(f"| {case} | {' | '.join(texts.get(way, '-') for way in strategies)} |")
    (sizes,) = {(r["queries"], r["keys"], r["heads"], r["kv_heads"]) for r in found.values()}
    caption = (
        "Speed over one GPU's kernel on all queries and keys, forward and backward; 2 is ideal. "
        f"{sizes[0]:,} queries and {sizes[1]:,} keys, {sizes[2]} query and {sizes[3]} KV heads."
    )
    return [*lines, "", caption, *(text for name in found for text in ("", records.where(name)))]


def _way(row: Row) -> str:
    return row["strategy"] if row["transport"] == "auto" else f"{row['strategy']}, {row['transport']}"


def _speed(row: Row) -> str:
    times = row.get(_DIRECTIONS[1])
    # The recorded ratio is relative to two GPUs at the kernel's speed.
    return f"{2 * times['ratio']:.2f}" if times else "refused"
