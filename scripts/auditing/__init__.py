"""A second auditor: it judges etcd's history by the documented contract, and shares no code with distop."""
