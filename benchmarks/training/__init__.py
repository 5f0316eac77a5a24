"""`bmburst bench train`: compares training steps of this library and of other methods with a bound from their FLOPs.

`cells` defines models, lengths, methods and the bound without torch. `tensor_v1` is the method that changes the model.
`measure` builds a cell's trainer and runs it on a rank. `report` contains the tables. `kind` registers the benchmark
with the engine: options, estimates of time, and pictures.
"""
