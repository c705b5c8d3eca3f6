"""Tables of Spark's own catalog: the format, and what the catalog says."""
