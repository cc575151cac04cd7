"""Grids of interventions: their axes, the metrics of their cells, and how they run."""
