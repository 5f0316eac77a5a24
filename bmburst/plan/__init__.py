"""What a training step would cost on a machine, before it is started: `bmburst plan`.

Pure arithmetic: nothing here communicates, and nothing but `calibrate/`, which measures a machine, imports torch.

- `hardware.py` with `data/*.toml`: what a GPU, its links and its host give, each number with its source
- `task.py`, `candidates.py`: what is to be trained, and the ways to do it
- `counts.py`, `operators.py`, `traffic.py`, `attention.py`, `step.py`: FLOPs, bytes, seconds
- `buffers.py`, `memory.py`: bytes that are alive at the peak of a step, line by line
- `search.py`, `table.py`, `figure.py`: the best first, as text with the command, and as a picture
- `measured.py`, `published.py`: what is predicted beside what was measured
"""
