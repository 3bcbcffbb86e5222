"""The processes of a run: their ranks, and how they connect, wait for one another, and end together."""
