"""Tables of Spark's own catalog: the format, and the reader of the catalog."""
