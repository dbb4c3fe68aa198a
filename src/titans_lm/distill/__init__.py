"""Training of adapters: a model with a window and a memory learns from the same weights with full attention."""
