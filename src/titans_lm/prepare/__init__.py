"""Text into tokens, once: `titans prepare` and what it is made of."""
