"""Rewards and data sets. Importing this package imports nothing else; take what you need from its modules."""
