"""`bmburst bench train`: compares training steps of this library and of other methods with a bound from their FLOPs.

`cells` defines models, lengths, methods and the bound, without torch. `tensor_v1` changes a model for a method,
`measure` runs a cell on a rank, `report` has the tables, and `kind` registers the benchmark with the engine.
"""
