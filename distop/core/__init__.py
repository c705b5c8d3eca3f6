"""The pure core: records, keys, transactions as values, the state tables, decisions and invariants.

Nothing here does I/O, reads a clock, draws a random number or knows asyncio (import contracts hold it).
"""
