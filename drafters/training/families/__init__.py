"""The families of drafters that are trained, behind one interface."""
