"""The benchmarks of distop, one module each; ``scripts/bench`` runs them."""
