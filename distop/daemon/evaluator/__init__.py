"""The third role of a daemon: it evaluates the policies of the tables for which it is elected."""
