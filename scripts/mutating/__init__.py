"""Mutants of distop: each leaves out one guard, one write or one age, and has to be found (scripts/mutate)."""
