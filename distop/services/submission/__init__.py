"""Starts operations: checks a request, and commits it in a guarded transaction, with retries (I39, I42).

Used by clients, by coordinators for follow-up operations, and by reruns. Nothing here waits for the end of an
operation.
"""
