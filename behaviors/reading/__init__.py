"""What operation types share when they read rows: Spark's session, and the expressions that they accept."""
