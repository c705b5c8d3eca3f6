"""Low-level claims: what a client does for people who write their own worker loop (L11-L24). It runs nobody's code."""
