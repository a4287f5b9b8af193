"""Many engines on many machines, through Ray; an extra that is imported when asked for."""
