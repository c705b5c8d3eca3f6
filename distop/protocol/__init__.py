"""The protocol in etcd: keys, records, state tables and transactions as values.

Pure: no I/O, no clock, no randomness and no loop.
"""
