"""LLaMA-family models on BMTrain (configuration, presets, layers, the whole model), and an encoder-decoder.

`config`, `presets` and `seq2seq_config` are plain data. The other modules define BMTrain classes and are imported only
where the runtime was started (`bmburst.runtime.start`), because on a machine without CUDA it must be in place before
BMTrain.
"""
