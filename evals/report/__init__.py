"""Reports: JSON with its provenance, tables, plots, one HTML page."""
