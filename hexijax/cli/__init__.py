"""The `hexijax` command; `main` parses it and imports only what a subcommand needs."""
