"""The `nsa` command, one file per subcommand."""
