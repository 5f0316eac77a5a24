"""Checkpoints and weights: tensor files, Hugging Face and ModelCenter directories, adapters, and training state.

`tensor_files` reads and writes named tensors, `sharded_files` those that several ranks hold. `hugging_face` and
`adapter` open, load and save models, `training` a run; `files` and `checksum` verify what is there. `model_center` maps
ModelCenter's names without torch, and `conversion` is `bmburst convert`.
"""
