"""What a configuration means to DeepSpeed, and what of a user's DeepSpeed JSON is taken over."""
