"""An engine of two workers with LoRA adapters, against transformers with merged weights.

``python -m tests.e2e.lora_ranks_check FOLDER KIND...`` writes ``report.json``: by kind and check what went wrong,
or null. ``test_lora_ranks`` reads it. A kind is ``tensor`` or ``pipeline``, with ``_v2`` for the V2 runner.
"""
