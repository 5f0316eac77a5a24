"""Weights of one model as Hugging Face, bmburst and ModelCenter keep them: names, configurations and files.

`model_center` is plain data and imports no torch; `directory` opens a model of any of these families as named tensors;
`files` writes them; `run` is what `bmburst convert` calls. No process ever holds more than a piece of a tensor.
"""
