"""A fair comparison of language models: equal parameters, equal tokens, equal tuning, several seeds."""
