"""Real clients against a live system: which of their features work, which the server refuses and why.

``make conformance`` starts one prefill and one decode worker with the built-in model, runs ``clients/check_*.py`` with
the clients that ``requirements.txt`` and ``clients/package.json`` pin, directly and behind nginx and HAProxy, and
writes ``docs/reference/clients.md``. ``make test`` does not run it: these files are named ``check_`` and have a
pytest.ini of their own.
"""
