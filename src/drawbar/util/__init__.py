"""Small helpers for every package: they import nothing of drawbar but ``errors``, and only ``dtypes`` needs torch."""
