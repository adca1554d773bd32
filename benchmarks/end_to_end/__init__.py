"""Whole training steps compared with the peers, and the longest context in a given memory."""
