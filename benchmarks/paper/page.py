"""Writes `docs/paper.md`: the verdicts on the paper's claims, and all tables between the page's markers.

Verdicts are computed from the recorded numbers. Tables are between `<!-- table: NAME -->` and `<!-- end -->`.
`python -m benchmarks.records` rewrites all of them.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from benchmarks.paper import curve, future, table_one, tables
from benchmarks.paper.claims import claims_table
from benchmarks.paper.tables import Recorded

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


TABLES: Mapping[str, Callable[[Recorded], list[str]]] = MappingProxyType(
    {
        "communication": lambda _: table_one.communication(),
        "memory": lambda _: table_one.memory(),
        "burst-and-kv": lambda _: table_one.burst_and_kv(),
        "backward": table_one.backward,
        "slow-link": table_one.slow_link,
        "merge": tables.merge,
        "tile": tables.tile,
        "first-token-7b": partial(tables.first_token, model="llama-2-7b"),
        "first-token-13b": partial(tables.first_token, model="llama-2-13b"),
        "perplexity": tables.perplexity,
        "training-7b": partial(tables.training, model="llama-2-7b"),
        "training-13b": partial(tables.training, model="llama-2-13b"),
        "training-13b-h100": partial(tables.training, model="llama-2-13b", record=tables.TRAIN_H100),
        "zero": tables.zero,
        "scaling": tables.scaling,
        "batches": tables.batches,
        "readme-lengths": tables.readme_lengths,
        "readme-batches": tables.readme_batches,
        "prediction": lambda _: curve.table(),
        "sparse": future.sparse,
        "cross": future.cross,
        "claims": claims_table,
    }
)


def filled(text: str, records: Recorded) -> str:
    """Return the page with its tables as the records say.

    Args:
        text: The page.
        records: What was recorded.
    """

    def table(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[2]](records)).rstrip()
        return f"{found[1]}\n{lines}\n\n{found[3]}"

    return _TABLE.sub(table, text)
