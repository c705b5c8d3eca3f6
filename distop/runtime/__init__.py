"""What each process of distop uses: logs, secrets, back-off, caches, time limits, Java."""
