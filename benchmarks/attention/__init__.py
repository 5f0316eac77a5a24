"""`bmburst bench attention`: measures attention over several ranks, by this library and by other methods.

`cells` defines shapes, masks and FLOPs without torch; `methods` has each method; `measure` runs a cell on a rank;
`report` has tables and pictures; `kind` registers them with the engine.
"""
