"""What models read: bytes as tokens, documents, batches, and tasks that are generated.

Import from the modules: `tokenizer`, `text`, `batches`, `recall`. This package imports nothing by itself, so that the
command line can name a setting without waiting for torch.
"""
