"""The planner, `bmburst plan`: predicts time and memory of training and inference on a machine before they run.

It is pure arithmetic: nothing here communicates, and only `rates`, which measures a machine, imports torch.
`bmburst.schedule` contains the hardware files and the cost model of attention.

- `candidates.py`, `ways.py`: what is trained (`Task`), a way to train it (`Candidate`), all such ways
- `counts.py`: parameters, FLOPs and bytes of operators
- `step.py`: seconds of a step, part by part
- `memory.py`, `moments.py`, `buffers.py`: bytes alive at the peak of a step, line by line
- `search.py`: predictions of all ways, the best first, and the recompute policy that "auto" selects
- `longest.py`: the longest sequence that each mesh can train
- `inference.py`: memory, lower bounds and times of prefill and decoding
- `presentation.py`: predictions as text with the command, as JSON and as a picture
- `rates.py`: a hardware file measured on this machine
"""
