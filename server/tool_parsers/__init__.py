"""Tool calls in a model's text: one file per format, none knows HTTP."""
