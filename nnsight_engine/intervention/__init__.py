"""The documented import paths of nnsight's ``intervention``; the names are defined elsewhere."""

from nnsight_engine.compat.import_paths import add_paths

add_paths(__name__)
