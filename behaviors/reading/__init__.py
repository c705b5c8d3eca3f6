"""What operation types know of a table's files: their footers, their metadata, and their rows in Spark."""
