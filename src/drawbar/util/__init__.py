"""Small helpers for every package. Of drawbar they import ``errors`` and one another; none needs torch."""
