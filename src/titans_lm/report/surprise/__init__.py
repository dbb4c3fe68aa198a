"""What surprised a memory, to look at: a page, a plot, and a line of JSON for every token.

Import from the modules: `files` writes all three. This package imports nothing by itself.
"""
