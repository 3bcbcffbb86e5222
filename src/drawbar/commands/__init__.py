"""What commands do with a run or its data besides training it: score, predict, generate, export, prepare."""
