"""Jobs on hosts that only ssh reaches: the commands, the messages over the connections, and who holds these."""
