"""What every room may use: errors, configs, files, names of choices. It imports no other room."""
