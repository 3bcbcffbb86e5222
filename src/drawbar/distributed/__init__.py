"""The processes of a run: which rank this is, how they meet, wait for one another, and end together."""
