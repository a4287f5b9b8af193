"""DFlash (arXiv 2602.06036): a block of drafts in one forward, from the features of the target."""
