"""Things that the server keeps by name: vectors, detectors, dictionaries, presets; and what names mean."""
