"""Which shape the next step's block has, and the measurements it is chosen by. The engine alone
asks it.
"""
