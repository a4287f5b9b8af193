"""LiLiCorr: a head whose candidates look at each other."""
