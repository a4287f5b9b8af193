"""Many engines on many machines, through Ray; an extra that nothing else imports before it is asked
for.
"""
