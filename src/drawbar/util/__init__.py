"""Small helpers for every package. Of drawbar they import ``errors`` and one another; only ``dtypes`` needs torch."""
