"""What drawbar's speed is, measured beside other ways to train: ``python -m benchmarks`` (see ``README.md``)."""
