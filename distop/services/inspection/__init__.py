"""The status of operations: reads records at one revision, and derives from them by pure functions."""
