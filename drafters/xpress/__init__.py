"""XPress's head on DFlash's backbone."""
