"""The invariants of distop, checked on a history of etcd. Pure (docs/internals/architecture.md)."""
