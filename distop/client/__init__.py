"""Clients for Python: starting, waiting, worker loops. Public through distop, distop.aio, distop.blocking."""
