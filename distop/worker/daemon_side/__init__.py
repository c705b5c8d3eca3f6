"""The daemon's side of the worker: starts the child, gives it runs and calls, takes their ends."""
