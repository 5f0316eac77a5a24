"""`bmburst bench paper` and `docs/paper.md`: the BurstAttention paper (arXiv:2403.09347), table by table.

`kind`, `variants` and `measure` contain the measurements that no other benchmark has: bytes and milliseconds of the
transfers in backward, the paper's ablations, and the tables of Burst-Attention's README. `overheads` contains the
formulas of the paper's first table, `perplexity` measures its last one. `table_one` and `tables` make the page's tables
from formulas and recorded JSON. `claims` judges the paper's claims by `verdicts`. `page` writes the page.
`python -m benchmarks.paper` prints or runs what measures each section.
"""
