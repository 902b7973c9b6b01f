"""draftsmith: trains DFlash drafters for Hugging Face causal language models, on one fixed shape."""

__version__ = "0.1.0"
