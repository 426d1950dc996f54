"""What a run tells: on the screen, and in files."""
