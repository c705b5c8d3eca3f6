"""Upkeep: prunes the history, sweeps result files, gives up holds that nobody sees to."""
