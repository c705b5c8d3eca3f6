"""Iceberg tables: the format, its metadata and catalogs, and how rows are read and schemas changed."""
