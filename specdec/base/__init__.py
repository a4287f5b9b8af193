"""What every room may use: errors, configurations, files, names. It imports nothing else."""
