"""A guest: runs on DeepSpeed. Its section of a configuration, the JSON that DeepSpeed gets, its engine, and its folders
of checkpoints."""
