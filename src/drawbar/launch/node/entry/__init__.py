"""Programs that jobs start by ``python -m`` on their nodes; each reads its arguments, and calls what is beside it."""
