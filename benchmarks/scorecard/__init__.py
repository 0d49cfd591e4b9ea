"""How many bugs does gpudist find, does it name the right cause, and does it accuse correct programs?

`make scorecard` answers that on a corpus in fixtures/corpus, on the programs of fixtures/manifest.py and on composed ones.
"""
