"""Training: one loop for every task, its optimizer, its checkpoints and its log.

Import from the modules: `loop.fit` is the loop, `language.train_language_model` what `titans train` runs. This package
imports nothing by itself, so that the command line can name a setting without waiting for torch.
"""
