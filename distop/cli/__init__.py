"""The command line. ``main`` is the entry point; every command imports its modules when it runs."""
