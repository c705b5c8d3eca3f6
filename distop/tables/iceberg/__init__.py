"""Iceberg tables: the format, metadata, manifests and catalogs, and the reader of their files."""
