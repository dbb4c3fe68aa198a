"""Time and memory of the op and of models, beside peers and beside the machine's own limit: `titans bench`.

Cases are measured in processes of their own, which answer with numbers; pages render the JSON that comes of it.
"""
