"""Batches: a data set's samples as runs, launched once each and resumed by the same command."""
