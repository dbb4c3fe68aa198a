"""DNA: sequences from files, a classifier on the backbone with its baselines, cross-validation, prediction."""
