"""What looks at runs from outside: whether a strategy computes what one process computes."""
