"""The coordinator role: plans, follows, completes and cleans up the operations of one type on one table (I24)."""
