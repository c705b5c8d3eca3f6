"""The command line. ``main`` is the entry; every command imports what it needs when it runs."""
