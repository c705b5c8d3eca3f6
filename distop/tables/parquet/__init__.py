"""Tables that are folders of Parquet files: the format, and the reader of their files."""
