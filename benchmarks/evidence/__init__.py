"""Keep all runs of a verification, so that another judge can be tried on them without starting a program.

A verification's only door to runs is its runner. `recording.py` has one that notes what each run was asked for and how it went;
`stored.py` has one that answers from these notes. All else, from the options to the verdict, is the product's own.
"""
