"""DFlash 2 (inco.ai, z-lab/dflash 0.1.0): convolutions and a candidate selector."""
