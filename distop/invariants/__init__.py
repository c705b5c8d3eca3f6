"""The invariants of distop, held against a history of etcd: pure (docs/internals/architecture.md, "Invariants")."""
