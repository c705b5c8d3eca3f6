"""The worker: the child in which behaviors run, the guardian that stops it, and the daemon's side of both.

Nothing is imported here: the guardian and the daemon must stay small.
"""
