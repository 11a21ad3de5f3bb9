"""Image question-answering agents trained with GRPO through Agent Lightning, verl and vLLM."""

__version__ = "0.1.0"
