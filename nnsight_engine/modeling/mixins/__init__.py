"""Mixins of model classes: loading, lazy loading, remote execution."""
