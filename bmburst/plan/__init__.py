"""The planner, `bmburst plan`: predicts time and memory of a training step on a machine before the step runs.

It is pure arithmetic: nothing here communicates, and only `rates`, which measures a machine, imports torch.
`bmburst.schedule` contains the hardware files and the cost model of attention.

- `candidates.py`: what is trained (`Task`) and the ways to train it (`Candidate`)
- `counts.py`: parameters, FLOPs and bytes of operators
- `step.py`: seconds of a step, part by part
- `buffers.py`, `memory.py`: bytes alive at the peak of a step, line by line
- `search.py`: predictions of all ways, the best first, and the recompute policy that "auto" selects
- `presentation.py`: predictions as text with the command, as JSON and as a picture
- `accuracy.py` with `data/*.toml`: predictions compared with measured and published numbers
- `rates.py`: a hardware file measured on this machine
"""
