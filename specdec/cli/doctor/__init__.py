"""`specdec doctor`: this machine, one model on it, and its kernels."""
