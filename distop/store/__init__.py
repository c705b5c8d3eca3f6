"""The only code that talks to etcd; it keeps the rules of docs/etcd-rules.md.

``config`` where etcd is · ``client`` transactions, reads, leases · ``watch`` list + watch · ``session`` the lease
keeper with the self-fencing deadline · ``embedded`` a private server.
Pure parts: ``codec``, ``failures``, ``position``.
"""
