"""Ordinary programs, drawn so that each pair of choices occurs, and what gpudist says of them.

The corpus holds what we thought of; these are programs as people write them. Each is right by construction, or has one bug that
is switched on, so that each false accusation and each missed bug is ours. `make everyday` judges a fresh draw.
"""
