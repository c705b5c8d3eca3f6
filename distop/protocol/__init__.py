"""What stands in etcd: keys, records, state tables, and every transaction on them as a value. Pure: no I/O, clock,
chance or loop."""
