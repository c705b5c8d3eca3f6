"""Mutants of distop: each changes one guard, write, age or step (scripts/mutate)."""
