"""A step as data: what is done in which order, what each operation waits for, and whether that holds together."""
