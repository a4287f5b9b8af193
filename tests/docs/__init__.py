"""What docs say and show."""
