"""The Spark session for checks and row expressions, for operation types that read rows."""
