"""The commands, as users call them: one folder each, with `cli` and `api` as their two doors.

In go words of a command line, or arguments of a function, and files of earlier runs. Out come a
run, an evaluation, a table, a page or a checkpoint, and an exit code.
"""
