"""What models read: bytes as tokens, documents, batches, and tasks that are generated.

This package imports nothing by itself, so that the command line can name a setting without waiting for torch.
"""
