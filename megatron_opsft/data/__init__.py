"""The problems: read from files and data sets, mixed, split, and made into prompts.

In go paths and the names of fields. Out come problems with gold answers, their prompts as token
ids, and the lists of rows that cannot be used.
"""
