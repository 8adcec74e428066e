"""The lowest layer: devices, processes and their groups, and files that survive a kill.

It exchanges tensors and objects between ranks, and writes files that exist whole or not at all.
"""
