"""What a model can do, in numbers: on any causal language model, ours or a baseline.

`bits_per_byte` is for documents in memory, `positions` for books, `accuracy` for tasks. This package imports nothing by
itself, so that the command line can name a setting without waiting for torch.
"""
