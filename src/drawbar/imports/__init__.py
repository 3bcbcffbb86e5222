"""``drawbar import``: configurations of other trainers, as one of drawbar's own. Executes nothing, asks no network."""
