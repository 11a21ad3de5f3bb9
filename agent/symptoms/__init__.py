"""From a symptom to its cause and its fix: the catalogue, and the commands that read it.

Nothing in this package imports torch, verl, vllm, ray or transformers: it works where those are broken.
"""

from agent.symptoms.entry import Cause, Entry, EntryError, Origin, Signature, load

__all__ = ["Cause", "Entry", "EntryError", "Origin", "Signature", "load"]
