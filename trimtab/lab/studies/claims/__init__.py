"""Claims about training, put to the test: small controlled runs, paired by seed, with a verdict for each hypothesis.

claim.py      the type of a claim: variants, metrics, hypotheses with their smallest effect of interest
declared.py   the claims
trial.py      settings and result of one run; its recipe
verdict.py    the paired interval and the verdict
"""
