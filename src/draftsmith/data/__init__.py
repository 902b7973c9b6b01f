"""Conversations in, documents with exact loss masks out, and the order in which they are trained on."""
