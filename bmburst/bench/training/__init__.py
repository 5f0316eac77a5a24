"""`bmburst bench train`: whole training steps by our defaults and by what others do, beside what kernels allow.

`cells` is what can be measured, as plain data; `methods` says how each trains and why it cannot; `bound` is the
arithmetic; `job` and `results` are the files; `rank` is what a rank runs: `steps` measures training steps, `rates` what
one GPU's kernels do, `losses` trains for the losses alone; `tensor_v1` and `peers` put a method into the model; `table`
and `figure` show it. Starting ranks, going on, and files are those of `bmburst.bench`.
"""
