"""Counting what a run costs: bytes kept, bytes at the peak, bytes sent."""
