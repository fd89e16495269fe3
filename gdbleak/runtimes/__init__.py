"""Who owns the objects: language runtimes with heaps of their own.
Each finds itself, lists objects, references and roots."""
