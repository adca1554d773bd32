"""Whole training steps beside the peers, and the longest context in a given memory."""
