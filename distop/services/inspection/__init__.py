"""How operations are doing, from records as they were at one revision: reads, and pure judgements of what was read."""
