"""Running a job elsewhere: what a job is, its text for each launcher, and what a node does before its ranks start.

Nothing here imports torch: submitting must be quick, and what runs on a node ends up as the ranks' launcher.
"""
