"""A run's files, read and written as one HTML page: without torch."""
