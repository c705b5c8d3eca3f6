"""What the roles of one incarnation share: its context, the operations that it knows, its reports, its files."""
