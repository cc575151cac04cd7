"""Trainings from labelled prompts: what those of vectors and of detectors share."""
