"""Small helpers for every package: they know nothing of drawbar but its errors, and only ``dtypes`` needs torch."""
