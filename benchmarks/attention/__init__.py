"""`bmburst bench attention`: measures attention over several ranks, with this library and with other methods.

`cells` defines shapes, masks and FLOPs without torch. `method` is the interface of a method with the kernel that all
run, `methods` lists them, `peers` and `packages` contain those of others. `measure` runs a cell on a rank. `kind`
registers the benchmark with the engine: options, estimates of time, tables and pictures.
"""
