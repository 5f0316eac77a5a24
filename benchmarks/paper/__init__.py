"""`bmburst bench paper` and `docs/paper.md`: the BurstAttention paper (arXiv:2403.09347), table by table.

`kind`, `variants` and `measure` measure what no other benchmark does: the bytes and milliseconds of backward's
transfers, the paper's ablations, and the tables of the README of Burst-Attention. `overheads` has the formulas of its
first table, `perplexity` its last one. `tables` makes the page's tables from recorded JSON, `page` judges the paper's
claims and writes the page.
"""
