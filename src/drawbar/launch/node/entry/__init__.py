"""Programs that are started by ``python -m`` on the nodes of a job; each reads its arguments or its standard
input."""
