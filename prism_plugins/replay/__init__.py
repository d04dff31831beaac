"""Replay: a rank of interest runs on a real GPU among virtual peers that answer when the simulation says."""
