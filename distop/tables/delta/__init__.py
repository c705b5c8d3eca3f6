"""The format of Delta Lake tables: planned from the log without a JVM, and read by Delta's own reader."""
