"""Small helpers for every package: of drawbar they import its errors alone, and only ``dtypes`` needs torch."""
