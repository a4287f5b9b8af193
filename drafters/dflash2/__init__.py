"""DFlash 2 (inco.ai, z-lab/dflash 0.1.0): a candidate selector on DFlash's backbone with
convolutions.
"""
