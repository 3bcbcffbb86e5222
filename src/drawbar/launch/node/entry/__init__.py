"""Programs that are started by ``python -m`` on the nodes of a job; each reads its arguments, and calls what is beside
it."""
