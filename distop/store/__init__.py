"""The etcd client and the only code that sends requests to etcd (docs/internals/etcd-rules.md).

``connection_settings`` endpoints and credentials · ``client`` transactions, reads, leases · ``watch`` list + watch ·
``session`` the lease with its self-fencing deadline · ``group_commit`` several writers in one transaction ·
``embedded`` a private server. Pure parts: ``etcd_messages``, ``grpc_failures``, ``watch_position``. Generated:
``_proto``, etcd's messages.
"""

import os

# With gRPC's fork handlers, a process forked while gRPC is busy dies before its exec, such as a JVM that Spark starts.
# A client must not be used across a fork anyway. To enable the handlers, set the variable to 1 before the process
# first uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
