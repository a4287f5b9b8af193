"""What the files of a DFlash drafter say, in every public layout. Loading and converting read and
write through it.
"""
