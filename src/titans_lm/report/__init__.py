"""Numbers as pictures and pages: plots, and HTML that needs nothing but itself.

Import from the modules: `plots`, `html`, `surprise.files`. This package imports nothing by itself.
"""
