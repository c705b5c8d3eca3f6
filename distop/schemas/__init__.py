"""JSON Schemas of operation types: which are accepted, and arguments checked against them."""
