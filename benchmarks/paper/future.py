"""The tables of what the paper leaves to future work, sparse attention and cross-attention, in `docs/paper.md`.

Both are measured by programs of their own: `benchmarks.block_sparse` and `benchmarks.cross`. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.tables import Recorded, gpu_of

SPARSE = "block_sparse_h200_202611"
CROSS = ("cross_2xh200_202611", "cross_2xh100_202611", "cross_striped_2xh100_202611")
"""Records of cross-attention."""
_DIRECTIONS = ("forward", "forward and backward")


def sparse(records: Recorded) -> list[str]:
    """Return by density and kernel how long block-sparse attention takes, and over its share of dense attention's."""
    found = records.record(SPARSE)
    if found is None:
        return [records.where(SPARSE)]
    lines = ["| visible blocks | kernel | forward | forward and backward |", "|---|---|---|---|"]
    for row in found["rows"]:
        texts = [_share(row, direction) for direction in _DIRECTIONS]
        lines.append(f"| {row['density']:.1%} | {row['kernel']} | {' | '.join(texts)} |")
    said = (
        f"ms, of dense attention's ms; in brackets the ratio of both over the share of visible blocks. "
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']}."
    )
    return [*lines, "", said, "", records.where(SPARSE)]


def _share(row: Mapping[str, Any], direction: str) -> str:
    times = row.get(direction)
    if not times:
        return "refused"
    return f"{times['milliseconds']:.1f} of {times['dense_milliseconds']:.1f} ({times['ratio']:.2f})"


def cross(records: Recorded) -> list[str]:
    """Return by mask and layouts the speed of each strategy, relative to one GPU's kernel on all queries and keys."""
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
    said = (
        "Speed over one GPU's kernel on all queries and keys, forward and backward; 2 is ideal. "
        f"{sizes[0]:,} queries and {sizes[1]:,} keys, {sizes[2]} query and {sizes[3]} KV heads."
    )
    return [*lines, "", said, *(text for name in found for text in ("", records.where(name)))]


def _way(row: Mapping[str, Any]) -> str:
    return row["strategy"] if row["transport"] == "auto" else f"{row['strategy']}, {row['transport']}"


def _speed(row: Mapping[str, Any]) -> str:
    times = row.get(_DIRECTIONS[1])
    # A ratio is over as many times one GPU's speed as there are ranks.
    return f"{2 * times['ratio']:.2f}" if times else "refused"
