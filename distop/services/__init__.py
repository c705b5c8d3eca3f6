"""Use cases of clients, commands and daemons. Nothing here prints."""
