"""Low-level claims for custom worker loops (L11-L24). It runs no caller's code."""
