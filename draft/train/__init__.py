"""Making heads: answers of a target, what it computed at each token, and a head trained on that.

Stands on draft/ and target/; engines and the command line come from outside (api/cli_train.py).
Nothing that serves imports it, but for traffic.py where traffic is kept.
"""
