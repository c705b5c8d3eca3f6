"""Tables that are folders of Parquet files: the format, and how their files are read."""
