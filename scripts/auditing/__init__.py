"""A second auditor: judges etcd's history by the contract, without distop's code."""
