"""The chat page: what it is made of (`static/`) and how it is served (`page.py`)."""
