"""`bmburst bench train`: measures training steps of this library and of other methods against a bound of their FLOPs.

`cells` defines models, lengths and the bound without torch; `methods` has each method, `tensor_v1` the one that changes
the model; `measure` builds a cell's trainer and runs it on a rank; `report` has tables; `kind` registers the benchmark
with the engine: options, estimates of time, and pictures.
"""
