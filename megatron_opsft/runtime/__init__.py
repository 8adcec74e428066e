"""What lies under everything: devices, processes and their groups, files that survive a kill.

In go tensors and objects of one rank, or bytes for one file. Out come those of all ranks, or a
file that is whole or not there.
"""
