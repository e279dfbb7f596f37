"""One file per command-line verb, each imported only when its verb is used. The table of verbs is
in cli.py.
"""
