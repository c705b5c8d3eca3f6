"""The process that carries the roles: one incarnation after another, and what each needs of its machine."""
