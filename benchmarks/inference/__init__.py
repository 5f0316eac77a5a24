"""`bmburst bench inference`: time to first token, time per token and memory, with this library and other methods.

`cells` defines models, lengths and methods, without torch. `peers` contains the prefill of other methods. `measure`
runs a cell on a rank. `kind` registers the benchmark with the engine: options, estimates of time, tables and pictures,
which also show the paper's numbers in `paper.json`.
"""
