"""Programs that are started by ``python -m`` on the nodes of a job, each of which reads its arguments or its standard
input; and how nodes reach one another."""
