"""Time series: tables, windows, forecasters on the backbone, baselines in the same code path, streaming forecasts.

A forecaster takes the last L values of C channels and gives the next H: (B, L, C) → (B, H, C).
"""
