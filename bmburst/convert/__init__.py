"""Converts weights between Hugging Face, bmburst and ModelCenter: names, configurations and files.

`model_center` maps ModelCenter's configurations and names, and imports no torch. `weights` opens a model of any of
these families as named tensors, and writes ModelCenter's file. `conversion` implements `bmburst convert`. No process
ever holds more than a piece of a tensor.
"""
