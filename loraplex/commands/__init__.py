"""The subcommands of `loraplex`."""
