"""The executor daemon: runs one incarnation after another, each with both roles."""
