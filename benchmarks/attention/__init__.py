"""`bmburst bench attention`: measures attention over several ranks, with this library and with other methods.

`cells` defines shapes, masks and FLOPs, without torch. `method` contains the interface of methods and the kernel that
they run, `methods` lists them, and `peers` and `packages` contain those of other projects. `measure` runs a cell on a
rank. `kind` registers the benchmark with the engine: options, estimates of time, tables and pictures.
"""
