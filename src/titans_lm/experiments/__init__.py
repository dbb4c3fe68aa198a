"""Experiments: models of equal size on one text or task from several seeds, and trained models that are measured."""
