"""What runs on the nodes of a job, before the ranks and around them: network route, rendezvous, node check, agent."""
