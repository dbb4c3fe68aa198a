"""What a model can do, in numbers: on any causal language model, ours or a baseline.

Import from the modules: `bits_per_byte` for documents in memory, `positions` for books, `accuracy` for tasks.
This package imports nothing by itself, so that the command line can name a setting without waiting for torch.
"""
