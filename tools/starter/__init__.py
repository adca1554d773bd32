"""Generates the files in `trimtab/starter`: the pretraining corpus, the held-out and replay text, the tokenizer.

Not part of the installed package; `trimtab/starter/README.md` has the commands.
"""
