"""What a run leaves on disk to be loaded again."""
