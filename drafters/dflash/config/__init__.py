"""What the files of a DFlash drafter say, in every public layout."""
