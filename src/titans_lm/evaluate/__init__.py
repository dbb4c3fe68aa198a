"""What a model can do, in numbers: on any causal language model, ours or a baseline.

Import from the modules: `perplexity` for bits per byte of documents, `recall` for associative recall, `questions` for
multiple choice and LAMBADA from files, `harness` for lm-eval. This package imports nothing by itself, so that the
command line can name a setting without waiting for torch.
"""
