"""`bmburst bench train`: whole training steps by our defaults and by what others do, beside what kernels allow.

`cells` is what can be measured, as plain data; `methods` says how each trains and why it cannot; `bound` is the
arithmetic; `measure` is what a rank does; `trainer` builds a cell's model, with `tensor_v1` put into it; `table` and
`figure` show the results; `kind` tells the engine.
"""
