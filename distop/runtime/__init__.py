"""Helpers of all processes of distop: logs, secrets, back-off, caches, time limits, Java."""
