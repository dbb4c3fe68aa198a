"""The tables and figures of the paper, as commands: `titans repro`."""
