"""Recipes: a TOML file of settings for each size and architecture, and what a training run of them would cost.

`titans train tiny-mac stdlib` trains one, `titans train 170m-mac --dry-run` says its size, memory and GPU-hours.
"""
