"""The experiments of the papers, a room each, with their pictures and text; ``studies`` is what the rooms share."""
