"""LLaMA-family models on BMTrain (configuration, presets, layers, the whole model), and an encoder-decoder.

`config`, `families`, `presets` and `seq2seq_config` are plain data. Most other modules import BMTrain. Import them only
after `bmburst.launch.start.start`: without CUDA, the host runtime must be installed before BMTrain is imported.
"""
