"""Upkeep: prunes the history, sweeps result files, and gives up abandoned holds."""
