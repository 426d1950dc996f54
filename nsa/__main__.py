"""`python -m nsa` is the `nsa` command."""

from nsa.cli.main import main

main()
