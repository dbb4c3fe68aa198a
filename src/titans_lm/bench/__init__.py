"""Time and memory of the op and of models, beside peers and beside the machine's own limit: `titans bench`.

Every case is measured in a fresh process of its own, which answers with numbers; this process runs them in turn, and
writes JSON. Documents render that JSON and hold no number of their own.
"""
