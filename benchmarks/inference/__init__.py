"""`bmburst bench inference`: first token, time of a token and memory of generation, by this library and other methods.

`cells` defines models, lengths and methods without torch; `peers` has the prefill of other methods, `measure` runs a
cell on a rank; `kind` registers the benchmark with the engine: options, estimates of time, tables and pictures, beside
the figures of the paper in `paper.json`.
"""
