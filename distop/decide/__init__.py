"""Pure decisions: what a coordinator or an executor does next, from one view and the time."""
