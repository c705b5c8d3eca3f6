"""The executor role: claims jobs, has them run in the child, and reports their ends (I25)."""
