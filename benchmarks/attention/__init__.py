"""`bmburst bench attention`: measures attention over several ranks, by this library and by other methods.

`cells` defines shapes, masks and FLOPs without torch; `methods` has each method; `measure` runs a cell on a rank;
`kind` registers the benchmark with the engine: options, estimates of time, tables and pictures.
"""
