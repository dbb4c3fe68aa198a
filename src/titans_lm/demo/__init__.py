"""What `titans demo` runs: a search in a long text, a small training, and a page that says what came out.

Import from the modules: `settings` names what is run, `run.run_demo` runs it. This package imports nothing by itself,
so that the command line can name a setting without waiting for torch.
"""
