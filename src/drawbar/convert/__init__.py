"""``drawbar convert``: between drawbar's checkpoints and those of other programs, in bounded memory."""
