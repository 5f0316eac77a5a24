"""`bmburst bench attention`: measures attention over several ranks, with this library and with other methods.

`cells` defines shapes, masks and FLOPs without torch. `methods` contains the methods. `measure` runs a cell on a rank.
`kind` registers the benchmark with the engine: options, estimates of time, tables and pictures.
"""
