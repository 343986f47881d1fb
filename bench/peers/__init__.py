"""Other systems to compare with, each installed in an environment of its own and served on given cores.

    install   vLLM's CPU build and NIXL from PyPI into an environment folder: ``tandem bench install-peers``
    vllm      that build, colocated or as a prefill and a decode server joined by NIXL, while it is measured
    proxy     the server in front of these two, which serve a prompt only one after the other

``tandem bench goals --peers FOLDER`` uses that folder.
"""
