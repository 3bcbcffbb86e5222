"""Pages of one HTML file: of runs, from their files, and of what parity found; without torch."""
