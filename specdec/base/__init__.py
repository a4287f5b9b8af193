"""What every room may use: errors, configurations, files, names of what can be chosen. It imports
nothing else of specdec.
"""
