"""Synthetic tasks: rows of ids made from random numbers, and what is to be said at some of their places."""
