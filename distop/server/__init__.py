"""The service: the same operations for callers without a connection to etcd."""
