"""`bmburst bench paper` and `docs/paper.md`: the BurstAttention paper (arXiv:2403.09347), table by table.

`kind` and `measure` contain the measurements that no other benchmark has: bytes and milliseconds of the transfers in
backward, the paper's ablations, and the tables of Burst-Attention's README. `overheads` contains the formulas of the
paper's first table, `perplexity` measures its last one, and `curve` draws predictions for its machines. `tables` makes
the page's other tables from recorded JSON. `claims` evaluates the paper's claims. `benchmarks.records` writes the page.
`python -m benchmarks.paper` prints or runs the commands that measure each section.
"""
