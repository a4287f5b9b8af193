"""Domino: DFlash's backbone with a recurrent head over the drafted tokens."""
