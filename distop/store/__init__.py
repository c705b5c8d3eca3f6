"""The only code that talks to etcd; it keeps the rules of docs/internals/etcd-rules.md.

``connection_settings`` where etcd is · ``client`` transactions, reads, leases · ``watch`` list + watch · ``session``
the lease keeper with the self-fencing deadline · ``embedded`` a private server.
Pure parts: ``etcd_messages``, ``grpc_failures``, ``watch_position``.
"""

import os

# gRPC runs handlers around a fork, and where it is busy at that moment the new process dies before it becomes what it
# was made for: a JVM that Spark starts beside a client, say. A client is not to be used across a fork anyway. Whoever
# needs the handlers sets this to 1; it counts if it is set before gRPC is first used in a process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
