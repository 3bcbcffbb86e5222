"""What a run will take: memory of each rank, bytes sent, time and disk, counted by steps that compute nothing."""
