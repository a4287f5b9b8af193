"""A server's processes: one of the engine, and those of fronts."""
