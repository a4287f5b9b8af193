"""What tests share: tiny models, scripted drafters, guards, an emulation of AITER, and where Triton
kernels run.
"""
