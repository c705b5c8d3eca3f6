"""Starting operations: what a caller asks is checked, and raced for with guarded transactions (I39, I42).

Clients, coordinators (what follows an operation) and reruns come in here; nothing here waits for an end."""
