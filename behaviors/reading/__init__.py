"""Shared by operation types that read rows.

The Spark session for checks, and row expressions.
"""
