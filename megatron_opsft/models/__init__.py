"""The weights of a model: their names and shapes (`architectures`), how each layout cuts them
(`weights`), and the files that hold them (`storage`).

In go a config.json and a layout. Out come the tensors of a rank, copies between two layouts, and
directories that Hugging Face and Megatron read.
"""
