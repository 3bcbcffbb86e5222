"""What a run shows and writes about itself: meters, metric files, the console."""
