"""The decoding step and all that serves it: scheduling, state on the device, acceptance, results,
captured steps.
"""
