"""What is known of jobs from files: their records, how they ended, how far their runs are, and their logs."""
