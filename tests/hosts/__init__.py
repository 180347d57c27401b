"""Hosts on one machine: ranks that share no memory, no processes and no files but what they are given, and a network that fails."""
